"""Meshes: their text form, their devices, and which mesh axis splits which parameter axis."""

import jax
import pytest
from jax.sharding import AxisType

from fp4jax.models import MODELS, Llama
from fp4jax.parallel import AXES, batch_sharding, make_mesh, parameter_sharding, parse_mesh
from fp4jax.train.step import Architecture


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("data=8", (8, 1, 1)), ("tensor=2, data=4", (4, 1, 2)), ("data=2,fsdp=2,tensor=2", (2, 2, 2))],
)
def test_a_mesh_is_read_from_text(text, sizes):
    assert tuple(parse_mesh(text).values()) == sizes
    mesh = make_mesh(text)
    assert mesh.axis_names == AXES
    assert tuple(mesh.shape.values()) == sizes
    assert set(mesh.axis_types) == {AxisType.Explicit}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh='': '' is no axis=size; write, say, data=2,fsdp=2,tensor=2"),
        ("data", "mesh='data': 'data' is no axis=size; write, say, data=2,fsdp=2,tensor=2"),
        ("data=0", "mesh='data=0': 'data=0' is no axis=size; write, say, data=2,fsdp=2,tensor=2"),
        ("data=-2", "mesh='data=-2': 'data=-2' is no axis=size; write, say, data=2,fsdp=2,tensor=2"),
        ("expert=2", "mesh='expert=2': 'expert' is no axis; there are data, fsdp, tensor"),
        ("data=2,data=4", "mesh='data=2,data=4' gives 'data' twice"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    assert str(error.value) == message


def test_a_mesh_takes_all_devices():
    with pytest.raises(ValueError, match=r"mesh=data=3,fsdp=1,tensor=1 takes 3 devices, and there are 8"):
        make_mesh("data=3")
    with pytest.raises(ValueError, match=r"mesh=\{'dta': 8\}: 'dta' is no axis; there are data, fsdp, tensor"):
        make_mesh({"dta": 8})


def test_neighbors_share_tensor():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert [d.id for d in mesh.devices[0, 0]] == [0, 1]
    assert [d.id for d in mesh.devices[:, 0, 0]] == [0, 4]


def test_rows_are_split_over_data_and_fsdp():
    sharding = batch_sharding(make_mesh("data=2,fsdp=2,tensor=2"))
    assert sharding.shard_shape((8, 16)) == (2, 16)


def test_every_parameter_of_the_model_has_a_place():
    mesh = make_mesh("fsdp=4,tensor=2")
    architecture = Architecture(lambda rngs: Llama(MODELS["tiny"], rngs=rngs))
    params, _ = jax.eval_shape(architecture.init, 0)
    axes = architecture.parameter_axes
    specs = jax.tree.map(
        lambda names, x: parameter_sharding(mesh, names, x.shape), axes, params, is_leaf=lambda x: isinstance(x, tuple)
    )
    split = jax.tree.map(
        lambda s, x: x.size // max(1, jax.numpy.prod(jax.numpy.array(s.shard_shape(x.shape)))), specs, params
    )
    matrices = [n for path, n in jax.tree_util.tree_leaves_with_path(split) if path[-1].key in ("kernel", "embedding")]
    assert len(matrices) == 9
    assert set(map(int, matrices)) == {8}
    assert tuple(specs["layers"]["mlp"]["down"]["kernel"].spec) == (None, "tensor", "fsdp")


def test_an_axis_that_cannot_be_split_is_named():
    mesh = make_mesh("tensor=8")
    with pytest.raises(ValueError) as error:
        parameter_sharding(mesh, ("embed", "mlp"), (32, 100))
    assert (
        str(error.value)
        == "mesh axis tensor=8 must divide the axis 'mlp' of size 100 of a parameter of shape (32, 100)"
    )
    with pytest.raises(ValueError, match="axis name 'width' is unknown; there are layers, embed"):
        parameter_sharding(mesh, ("width",), (32,))
