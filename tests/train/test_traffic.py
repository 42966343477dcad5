"""Collectives read from HLO: small sharded programs whose traffic is known, loops, every spelling of groups."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from fp4jax.parallel import fp8_mean, make_mesh
from fp4jax.train.traffic import Transfer, compile_partitioned, read_traffic, replica_groups

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def traffic_of(function, *arguments, in_specs=P(), out_specs=P(), sizes=SIZES):
    """Traffic of a function under `shard_map`, compiled from shapes; one spec for all arguments."""
    mesh = make_mesh(sizes)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    sharding = jax.NamedSharding(mesh, in_specs)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]
    _, text = compile_partitioned(jax.jit(mapped).lower(*placed))
    return read_traffic(text, sizes)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_every_collective_with_its_bytes_axes_and_dtype():
    n = 24

    def program(x, y):
        a = lax.psum(x, "data")
        b = lax.all_gather(x, "fsdp", tiled=True)
        c = lax.psum_scatter(x, ("data", "fsdp"), tiled=True)
        d = lax.all_to_all(y.reshape(2, -1), "tensor", 0, 0, tiled=True)
        e = lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
        f = lax.psum(y, ("data", "tensor"))
        return sum(jnp.sum(v.astype(jnp.float32)) for v in (a, b, c, d, e, f))

    found = set(traffic_of(program, array(n), array(n, dtype=jnp.bfloat16)).transfers)
    assert found == {
        Transfer("all-reduce", "data", "f32", 2, 1, 4 * n, 4 * n),
        Transfer("all-gather", "fsdp", "f32", 2, 1, 8 * n, 4 * n),
        Transfer("reduce-scatter", "data+fsdp", "f32", 4, 1, 4 * n, 3 * n),
        Transfer("all-to-all", "tensor", "bf16", 2, 1, 2 * n, n),
        Transfer("collective-permute", "tensor", "f32", 2, 1, 4 * n, 4 * n),
        Transfer("all-reduce", "data+tensor", "bf16", 4, 1, 2 * n, 3 * n),
    }


def test_a_loop_counts_its_length_and_loops_multiply():
    n, outer, inner = 10, 5, 3

    def program(x):
        def body(carry, _):
            carry = lax.fori_loop(2, 2 + inner, lambda _, c: lax.psum(c, "fsdp") * 0.5, carry)
            return lax.psum(carry, "data") * 0.5, None

        x, _ = lax.scan(body, x, None, length=outer)
        return lax.psum(x, "tensor")

    found = traffic_of(program, array(n))
    assert {t.axes: (t.times, t.bytes) for t in found.transfers} == {
        "fsdp": (outer * inner, outer * inner * 4 * n),
        "data": (outer, outer * 4 * n),
        "tensor": (1, 4 * n),
    }
    assert found.unknown_loops == 0
    assert found.sent == 4 * n * (outer * inner + outer + 1)


def test_the_backward_pass_of_a_scan_counts_as_well():
    length, n = 7, 6

    @jax.grad
    def program(w):
        def body(x, w):
            return lax.psum(x * w, "data"), None

        return jnp.sum(lax.scan(body, jnp.ones(n), w)[0])

    found = traffic_of(program, array(length, 2 * n), in_specs=P(None, "tensor"), out_specs=P(None, "tensor"))
    assert [(t.axes, t.times, t.bytes) for t in found.transfers] == [("data", 2 * length, 2 * length * 4 * n)]


def test_loops_of_unknown_length_are_counted_once_and_named():
    def program(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: lax.psum(c, "data"), x)

    found = traffic_of(program, array(4))
    assert [(t.times, t.bytes) for t in found.transfers] == [(1, 16)]
    assert found.unknown_loops == 1


def test_fp8_gradients_travel_at_a_byte_an_element():
    n = 4096
    found = traffic_of(lambda g: fp8_mean({"w": g[0]}, "data"), array(8, n), in_specs=P("data"), sizes={"data": 8})
    bytes_of = {(t.kind, t.dtype): t.bytes for t in found.transfers}
    assert bytes_of.pop(("all-to-all", "u8")) == n
    assert bytes_of.pop(("all-gather", "u8")) == n
    assert set(bytes_of) == {("all-reduce", "f32")}  # the scales
    assert sum(bytes_of.values()) <= 16


def test_a_program_of_one_device_sends_nothing():
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    sharding = jax.NamedSharding(mesh, P())
    _, text = compile_partitioned(jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)))
    assert read_traffic(text, {"data": 1}).transfers == ()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}, channel_id={{9}}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,4},{1,5},{2,6},{3,7}}, to_apply=%add", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}, dimensions={0}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=4,'b'=2] {}", [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_every_spelling_of_groups(text, groups):
    assert replica_groups(f"channel_id=1, replica_groups={text}", 8) == groups


def test_another_spelling_is_an_error():
    with pytest.raises(ValueError, match=r"replica groups of a spelling unknown to this version: 'rings\(8\)"):
        replica_groups("replica_groups=rings(8)", 8)
