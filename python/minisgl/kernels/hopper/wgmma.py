"""Writes the functions of CUDA C++ that multiply by wgmma."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Instruction(NamedTuple):
    """A form of wgmma: its name after `m64nN`, and its operands after the predicate."""

    kind: str
    options: str = ""
    name: str = "multiply"
    has_left: bool = False  # the left operand is in registers, not in shared memory


@cache
def multiply_source(columns: int, product: Instruction) -> str:
    """Return a function: sums [64, columns] = a b + (more ? sums : 0), over 32 inputs of 8 bits or 16 of 16 bits.

    wgmma names all registers of its result, so its text depends on their number. They are float4, or int4 for sums of
    integers: see "fragments of wgmma" in the PTX ISA.
    """
    n, is_int = columns // 2, ".s32" in product.kind
    kind, sums = ("r", "int4") if is_int else ("f", "float4")
    registers = ", ".join(f"%{i}" for i in range(n))
    results = ", ".join(f'"+{kind}"(sums[{j}].{c})' for j in range(columns // 8) for c in "xyzw")
    if product.has_left:
        left, operands, used = "const u32 (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4)), 4
        text = "{" + ", ".join(f"%{n + i}" for i in range(4)) + "}"
    else:
        left, operands, used, text = "u64 a", '"l"(a)', 1, f"%{n}"
    operands += ', "l"(b), "r"(more)'
    return f"""
__device__ __forceinline__ void {product.name}({sums} (&sums)[{columns // 8}], {left}, u64 b, int more) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{n + used + 1}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{columns}{product.kind} "
                 "{{{registers}}}, {text}, %{n + used}, p{product.options}; }}" : {results} : {operands});
}}
"""
