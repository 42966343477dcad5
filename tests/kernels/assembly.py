"""An interpreter for the few PTX instructions of the kernels' inline assembly."""

import numpy as np


def run_assembly(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Executes the few PTX instructions of the kernel on arrays of 32-bit registers."""
    registers = dict(operands)

    def read(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def halves(operation):
        return lambda a, b: operation(a & 0xFFFF, b & 0xFFFF) | operation(a >> 16, b >> 16) << np.uint32(16)

    def signs(a, _b, selector):
        assert selector == 0xBB99
        low, high = ((a >> np.uint32(bit) & 1) * np.uint32(0xFFFF) for bit in (15, 31))
        return low | high << np.uint32(16)

    def shift_left(low, high, amount):
        both = np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low, np.uint64)
        return both << (np.asarray(amount, np.uint64) & np.uint64(31)) >> np.uint64(32) & np.uint64(0xFFFFFFFF)

    instructions = {
        "prmt.b32": signs, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor, "add.u32": np.add,
        "sub.u32": np.subtract, "max.u16x2": halves(np.maximum), "min.u16x2": halves(np.minimum),
        "shr.u32": np.right_shift, "shf.l.wrap.b32": shift_left,
    }  # fmt: skip
    for line in text.strip(" \n{}").splitlines():
        name, _, rest = line.strip(" ;").partition(" ")
        if name != ".reg":
            target, *sources = (word.strip() for word in rest.split(","))
            registers[target] = instructions[name](*(read(source) for source in sources)).astype(np.uint32)
    return registers
