"""`experiments/kernels/deviceless.py` counts the bytes of a program; compiling for a GPU needs its plugin."""

import pytest

HLO = """HloModule step

%taken (stack: bf16[3,8,16], i: s32[]) -> bf16[8,16] {
  %stack = bf16[3,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,8,16]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %whole = bf16[8,16]{1,0} bitcast(%slice)
}

%kept (stack: bf16[3,8,16], x: bf16[8,16], i: s32[]) -> bf16[3,8,16] {
  %stack = bf16[3,8,16]{2,1,0} parameter(0)
  %x = bf16[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = bf16[1,8,16]{2,1,0} bitcast(%x)
  ROOT %written = bf16[3,8,16]{2,1,0} dynamic-update-slice(%stack, %one, %i, %zero, %zero)
}

%body (state: (s32[], bf16[3,8,16])) -> (s32[], bf16[3,8,16]) {
  %state = (s32[], bf16[3,8,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[3,8,16]{2,1,0} get-tuple-element(%state), index=1
  %x = bf16[8,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%taken, metadata={op_name="jit(step)/swiglu/mul"}
  %new = bf16[3,8,16]{2,1,0} fusion(%stack, %x, %i), kind=kLoop, calls=%kept
  ROOT %next = (s32[], bf16[3,8,16]{2,1,0}) tuple(%i, %new)
}

%condition (state: (s32[], bf16[3,8,16])) -> pred[] {
  %state = (s32[], bf16[3,8,16]{2,1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (state: (s32[], bf16[3,8,16])) -> (s32[], bf16[3,8,16]) {
  %state = (s32[], bf16[3,8,16]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[3,8,16]{2,1,0}) while(%state), condition=%condition, body=%body, \
metadata={op_name="jit(step)/while"}, backend_config={"known_trip_count":{"n":"3"}}
}
"""


@pytest.fixture(scope="module")
def deviceless(kernel_script):
    return kernel_script("deviceless")


def test_of_a_stack_each_turn_reads_and_writes_one_layer(deviceless):
    layer, index = 8 * 16 * 2, 4
    turn = {"swiglu": layer + index + layer, "copies": layer + index + layer}
    found = deviceless.by_parts(HLO)
    assert found == {"SwiGLU": 3.0 * turn["swiglu"], "copies": 3.0 * turn["copies"]}


def test_help_names_the_options(deviceless, capsys):
    with pytest.raises(SystemExit, match="0"):
        deviceless.main(["--help"])
    assert "--unrolled" in capsys.readouterr().out
