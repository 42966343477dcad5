"""Where the time of a step goes: of a synthetic trace of a GPU, and of a real one of a CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

import fp4jax
from fp4jax.bench import parts, profile, trace
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.parts import Part, Parts
from fp4jax.bench.report import Breakdown
from fp4jax.dot import explain
from fp4jax.models import MODELS, LlamaConfig

SMALL = LlamaConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=1, num_kv_heads=1, head_dim=32, mlp_dim=64)

HLO = """HloModule jit_step

%fused_computation (p0: f32[8,16], p1: f32[8]) -> bf16[8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %sum = f32[8]{0} add(%p1, %p1), metadata={op_name="jit(step)/jvp(swiglu)/add"}
  %spread = f32[8,16]{1,0} broadcast(%sum), dimensions={0}, metadata={op_name="jit(step)/jvp(swiglu)/mul"}
  %mul.1 = f32[8,16]{1,0} multiply(%p0, %spread), metadata={op_name="jit(step)/transpose(jvp(rms_norm))/mul"}
  ROOT %convert.1 = bf16[8,16]{1,0} convert(%mul.1)
}

%slicing (p0: f32[2,8]) -> bf16[8] {
  %p0 = f32[2,8]{1,0} parameter(0)
  %slice.1 = f32[1,8]{1,0} dynamic-slice(%p0), dynamic_slice_sizes={1,8}, metadata={op_name="jit(step)/while/body/s"}
  ROOT %convert.2 = bf16[8]{0} convert(%slice.1)
}

%multiplying (p0: bf16[8,8]) -> f32[8,8] {
  %p0 = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.9 = f32[8,8]{1,0} dot(%p0, %p0), metadata={op_name="jit(step)/head/dot_general"}
}

%stacking (p0: f32[8,16]) -> f32[2,8] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %custom-call.6 = f32[8]{0} custom-call(%p0), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp())/while/body/jit(fp4jax_wgrad_fp4_hopper_1a2b3c4d)/fp4jax_scaled_matmul/mpmd_map"}
  ROOT %stack.1 = f32[2,8]{1,0} dynamic-update-slice(%p0, %custom-call.6)
}

ENTRY %main (x: f32[8,16]) -> f32[8] {
  %x = f32[8,16]{1,0} parameter(0)
  %loop_multiply_fusion.3 = bf16[8,16]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation
  %slice_fusion = bf16[8]{0} fusion(%x), kind=kLoop, calls=%slicing
  %gemm_fusion = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%multiplying
  %custom-call.1 = bf16[8,8]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp())/while/body/jit(fp4jax_dgrad_fp4_hopper_1a2b3c4d)/fp4jax_scaled_matmul/mpmd_map"}
  %custom-call.2 = bf16[8,8]{1,0} custom-call(%x), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
  %custom-call.3 = bf16[8,8]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/jvp(attention)/fwd"}
  %custom-call.4 = u8[8]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/jvp(quantize)/quantile/fp4jax_quantile_survey/pallas_call"}
  %stacking_fusion = f32[2,8]{1,0} fusion(%x), kind=kCustom, calls=%stacking
  %all-reduce.1 = f32[8]{0} all-reduce(%x), to_apply=%slicing
  %while.1 = f32[8]{0} while(%x), condition=%slicing, body=%slicing, metadata={op_name="jit(step)/jvp(loss)/while"}
  %cast_fusion = bf16[8]{0} fusion(%x), kind=kLoop, calls=%slicing, metadata={op_name="jit(step)/jit(fp4jax_fprop_fp4_xla_1a2b3c4d)/convert"}
  %wide.1 = f32[8,16]{1,0} multiply(%x, %x), metadata={op_name="jit(step)/jvp(quantize)/mul"}
  %wide.2 = f32[8,16]{1,0} multiply(%x, %x), metadata={op_name="jit(step)/jvp(loss)/mul"}
  ROOT %add.7 = f32[8]{0} add(%x, %x)
}
"""  # noqa: E501


def space(planes: dict[str, dict[str, list[tuple[str, str, int, int]]]]) -> bytes:
    """A trace of planes of lines of events (kernel, hlo_op, start, duration), in microseconds."""
    text, names = [], {}
    for plane, lines in planes.items():
        body = []
        for line, events in lines.items():
            shown = []
            for kernel, hlo_op, start, duration in events:
                number = names.setdefault(kernel, len(names) + 1)
                stat = f'stats {{ metadata_id: 1 str_value: "{hlo_op}" }}' if hlo_op else ""
                when = f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6}"
                shown.append(f"events {{ metadata_id: {number} {when} {stat} }}")
            body.append(f'lines {{ name: "{line}" {" ".join(shown)} }}')
        known = [f'event_metadata {{ key: {n} value {{ id: {n} name: "{k}" }} }}' for k, n in names.items()]
        stat = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
        text.append(f'planes {{ name: "{plane}" {" ".join(body + known)} {stat} }}')
    return ProfileData.text_proto_to_serialized_xspace("\n".join(text))


@pytest.mark.parametrize(
    ("hlo_op", "kernel", "part"),
    [
        ("loop_multiply_fusion.3", "loop_multiply_fusion_3", Part(parts.NORMS)),
        ("", "loop_multiply_fusion_3", Part(parts.NORMS)),  # by the kernel's name alone
        ("slice_fusion", "x", Part(parts.MOVES, "slices of stacked layers")),
        ("gemm_fusion", "x", Part(parts.HEAD)),
        ("custom-call.1", "fp4jax_scaled_matmul_kernel", Part(parts.PRODUCTS, "dgrad")),
        ("stacking_fusion", "fp4jax_scaled_matmul_kernel", Part(parts.PRODUCTS, "wgrad")),
        ("", "fp4jax_scaled_matmul_kernel", Part(parts.PRODUCTS, "fp4jax")),
        ("custom-call.2", "nvjet_tst_128x256", Part(parts.PRODUCTS, "high precision, backward")),
        ("custom-call.3", "x", Part(parts.ATTENTION)),
        ("custom-call.4", "fp4jax_quantile_survey", Part(parts.QUANTILE)),
        ("custom-call.4", "x", Part(parts.QUANTILE)),
        ("custom-call.7", "fp4jax_quantize_tiles__2", Part(parts.QUANTIZERS, "quantize_tiles")),
        ("all-reduce.1", "ncclDevKernel", Part(parts.COLLECTIVES)),
        ("cast_fusion", "x", Part(parts.QUANTIZERS, "XLA")),
        ("add.7", "x", Part(parts.OTHER)),
        ("", "cudnn_generated_sdpa_sm90", Part(parts.ATTENTION)),
        ("", "MemcpyD2D", Part(parts.MOVES, "casts, transposes")),
        ("", "nvjet_hsh", Part(parts.PRODUCTS, "high precision")),
        ("", "unheard_of", Part(parts.OTHER)),
    ],
)
def test_kernels_are_told_apart(hlo_op, kernel, part):
    assert Parts(HLO).part(hlo_op, kernel) == part


def test_wide_results_around_products_are_found():
    assert [i.name for i in Parts(HLO).wide({8 * 16})] == ["wide.1"]  # nothing inside a fusion, nothing of the loss
    assert not Parts(HLO).wide({8 * 17})


def test_the_innermost_scope_counts():
    assert parts.scope("jit(step)/transpose(jvp(rms_norm))/mul") == Part(parts.NORMS)
    assert parts.scope("jit(f)/jvp(quantize)/quantile/add") == Part(parts.QUANTILE)
    assert parts.scope("jit(f)/headless/losses/add") is None


def test_a_trace_of_a_gpu():
    """Two streams, two steps of 100 µs; the plane also has lines that repeat its kernels."""
    events = [
        ("nvjet", "custom-call.2", 0, 40),
        ("loop_multiply_fusion_3", "loop_multiply_fusion.3", 42, 8),
        ("nvjet", "custom-call.2", 100, 40),
        ("loop_multiply_fusion_3", "loop_multiply_fusion.3", 142, 8),
    ]
    copies = [("MemcpyD2D", "", 30, 15), ("MemcpyD2D", "", 180, 20)]
    recorded = space({
        "/host:CPU": {"python": [("PjitFunction", "", 0, 500)]},
        "/device:GPU:0": {"Stream #1(Compute)": events, "Stream #2(Memcpy)": copies, "XLA Ops": events},
        "/device:GPU:1": {"Stream #1(Compute)": events},
    })  # fmt: skip
    found = profile.spent(recorded, HLO, steps=2)
    micros = {part: 1e6 * seconds for part, seconds in found.seconds.items()}
    assert micros == {
        Part(parts.PRODUCTS, "high precision, backward"): pytest.approx(40),
        Part(parts.NORMS): pytest.approx(8),
        Part(parts.MOVES, "casts, transposes"): pytest.approx(17.5),
        Part(parts.IDLE, "between kernels"): pytest.approx(1),
        Part(parts.IDLE, "waits of 5 µs and more"): pytest.approx(40),
        Part(parts.OVERLAP): pytest.approx(-6.5),
    }
    assert sum(micros.values()) == pytest.approx(100)  # the length of a step
    assert found.kernels[0] == {
        "kernel": "nvjet",
        "part": "products of linear layers / high precision, backward",
        "launches": 1,
        "microseconds": 40,
        "hlo_op": "custom-call.2",
        "type": "bf16[8,8]{1,0}",
        "op_name": "jit(step)/transpose(jvp())/dot_general",
    }
    assert found.waits[0] == {"microseconds": 50.0, "after": "loop_multiply_fusion_3", "before": "nvjet"}


def test_several_stand_side_by_side():
    one = profile.Spent({Part(parts.PRODUCTS, "fprop"): 3e-3, Part(parts.PRODUCTS, "dgrad"): 4e-3}, [], [])
    two = profile.Spent({Part(parts.PRODUCTS, "fprop"): 2e-3, Part(parts.LOSS): 1e-3}, [{"kernel": "k"}], [])
    table = profile.side_by_side("t", {"a": one, "b": two}, ({parts.PRODUCTS: 1e-3}, {}))
    assert [row[:2] for row in table.rows] == [(parts.PRODUCTS, "dgrad"), (parts.PRODUCTS, "fprop"), (parts.LOSS, "")]
    assert table.total() == pytest.approx((7e-3, 3e-3))
    assert table.total(parts.PRODUCTS) == pytest.approx((7e-3, 2e-3))
    assert table.json()["kernels"]["b"] == [{"kernel": "k"}]
    assert table.table().row_count == 6  # two groups, two details, all, the ratio


def test_aims_of_a_profile():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
    explained = explain(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w)
    of = profile.Spent(
        {Part(parts.PRODUCTS, "high precision, forward"): 2e-3, Part(parts.PRODUCTS, "fprop"): 1.0}, [], []
    )
    bars = profile._aims("fp4", of, explained, Parts(HLO).wide({8 * 16}))
    assert [bar.value for bar in bars] == [1, 2, 1]  # on xla, in BF16, wide.1
    assert not any(bar.passed for bar in bars)


def test_a_trace_without_a_device_says_what_it_holds():
    recorded = space({"/host:CPU": {"python": [("PjitFunction", "", 0, 500)]}})
    with pytest.raises(ValueError, match=r"planes and lines are \{'/host:CPU': \['python'\]\}"):
        trace.read(recorded)


def test_a_real_trace_of_a_cpu():
    @jax.jit
    def run(x):
        with jax.named_scope("loss"):
            x = jnp.sin(x) @ x
        return jax.lax.scan(lambda c, _: (jnp.tanh(c) + 1, None), x, None, length=3)[0]

    x = jnp.ones((128, 128))
    compiled = run.lower(x).compile()
    jax.block_until_ready(compiled(x))
    found = profile.spent(trace.record(lambda: jax.block_until_ready(compiled(x))), compiled.as_text(), steps=1)
    assert found.seconds[Part(parts.LOSS)] > 0
    assert found.seconds[Part(parts.PRODUCTS, "high precision, forward")] > 0
    assert max(kernel["launches"] for kernel in found.kernels if "while/body" in kernel["op_name"]) == 3


def test_a_profile_of_a_step_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", SMALL)
    config = BenchConfig(model="tiny", seq_len=8, batch_size=1, recipes=(), out=tmp_path / "bench.json")
    (table,) = profile.profile(config, None)
    assert isinstance(table, Breakdown)
    assert {p["kind"] for p in table.json()["products"]["BF16"]} == {"plain"}
    assert table.columns == ("BF16",)
    groups = {group for group, _, _ in table.rows}
    assert groups >= {parts.PRODUCTS, parts.ATTENTION, parts.NORMS, parts.SWIGLU, parts.LOSS, parts.OPTIMIZER}
    again = profile.of_folder(tmp_path / "bench.profile")
    assert again.rows == table.rows
