"""Launches `gemv.cu`, chains of GEMVs with quantized weights for Hopper in CUDA C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, empty

from minisgl.core.rounding import ceil_div, round_up
from minisgl.kernels.hopper.nvrtc import launch, load_kernel
from minisgl.kernels.triton.launch import is_noted
from minisgl.kernels.triton.product import Mixture, Norm, Product
from minisgl.kernels.triton.quantized_gemv import quantized_gemv
from minisgl.ops.deferred import Deferred, Result, finished
from minisgl.ops.quantized import Format, Quantized
from minisgl.ops.reference import Experts

WARPS: Final = 8
CHAIN_WARPS: Final = 16  # of a chain with 4-bit weights, which take more instructions per byte
UNIT: Final = 64  # bytes of a row that a warp copies and multiplies at once
MAX_INPUTS: Final = 25600  # a warp's columns of x must fit in its registers
MAX_OUTPUTS: Final = 256  # per CTA: one per thread of the fewest warps
FLOATS: Final = (torch.bfloat16, torch.float16)
GATES: Final = ("", "silu", "gelu_tanh", "clamped")  # indexed by GATE in the kernels
MAX_WARPS: Final = 20  # MAX_THREADS in `gemv.cu`
MAX_LINKS: Final = 4  # of a chain: o, gate and up, down, the next layer's qkv
REGISTERS: Final = 1 << 16  # per SM
# Shared memory of a CTA with a norm and of one without, in bytes. In a layer, GEMVs with and without a norm alternate.
# One CTA of each kind fits on an SM, so that the next GEMV can prefetch its weights. Two CTAs of one kind must not fit:
# otherwise an SM that attention has left first would get two of them and another SM none. So a CTA with a norm takes
# more than half of the shared memory, and one without a norm has idle warps that take more than half of the registers.
SHARED_MEMORY: Final = {True: 118 << 10, False: 107 << 10}
MORE_THAN_HALF: Final = 114 << 10
CHAIN_MEMORY: Final = 184 << 10  # of a CTA of a chain, beside which a CTA of decode attention fits


class _Link(ctypes.Structure):
    """`struct Link` in `gemv.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zeros", "bias", "norm_weight", "total", "results")),
        ("n_out", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


class Arguments(ctypes.Structure):
    """`struct Arguments` in `gemv.cu`, which has as many links as the chain."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual_or_experts", "out", "launch_or_choices")),
        ("links", _Link * MAX_LINKS),
    ]


class ResidualSum:
    """x + residual [1, K], which a link stores when a chain with it runs."""

    def __init__(self, stored: Tensor) -> None:
        self.stored, self.shape, self.dtype, self.device = stored, stored.shape, stored.dtype, stored.device
        self.chain: Chain | None = None  # until it runs

    def finish(self) -> Tensor:
        if self.chain is not None:
            self.chain.finish()
        return self.stored


class Link(NamedTuple):
    """A GEMV of a chain: x [1, K] -> f(norm(x + residual)) W^T + b [1, N]."""

    weight: Quantized
    bias: Tensor | None = None
    gate: str = ""
    norm: Norm | None = None
    total: ResidualSum | None = None  # if there is a residual

    @property
    def n_out(self) -> int:
        return self.weight.shape[0] // (2 if self.gate else 1)


class Chain(NamedTuple):
    """GEMVs for a row x [1, K], each of which reads the result of the one before, as one kernel."""

    x: Tensor
    links: tuple[Link, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.links[-1].n_out

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def fits(self, link: Link) -> bool:
        """Whether the kernel can go on with `link`, whose residual must be the sum of the norm before."""
        if len(self.links) == MAX_LINKS or link.weight.format != self.links[0].weight.format:
            return False
        max_outputs = torch.cuda.get_device_properties(self.device).multi_processor_count * MAX_OUTPUTS
        if any(each.n_out > max_outputs for each in (*self.links, link)):
            return False
        totals = [each.total for each in self.links if each.norm is not None]
        if link.norm is None or not totals:
            return True
        residual = link.norm.residual
        return isinstance(residual, Deferred) and residual.work is totals[-1]

    def finish(self) -> Tensor:
        """Launch the kernel, and return the last link's result [1, N]."""
        x, links = self
        out = empty(self.shape, dtype=x.dtype, device=x.device)
        results = (
            None if len(links) == 1 else _results(x.device, results_size(links), tuple(link.n_out for link in links))
        )
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        plan = plan_launch(self, out, results, num_sms)
        for link in links:
            if link.total is not None:
                link.total.chain = None
        return out if plan.start(x.device) else self._finish_by_triton()

    def _finish_by_triton(self) -> Tensor:
        x = self.x
        for weight, bias, gate, norm, total in self.links:
            x, stored = quantized_gemv(x, weight, bias, gate, norm)
            if total is not None:
                total.stored = stored
        return x


def refuses(product: Product) -> str | None:
    """Return why `gemv.cu` does not run a product; None if it does."""
    if product.kind is None or product.rows != 1:
        return "for one row and quantized weights"
    if not _supports_matrix(product.kind, product.n_in):
        return "for scales of rows in 8 bits, or of 128 columns in 4"
    if product.dtype not in FLOATS or product.norm_dtype not in (None, product.dtype):
        return "for rows in 16 bits, and norms in the same type"
    return None


def _supports_matrix(kind: Format, n_in: int) -> bool:
    if kind.bits == 8:
        is_supported = kind.group == 0 and n_in % UNIT == 0 and kind.scale_dtype is torch.float32
    else:
        is_supported = kind.name == "int4" and kind.group == 128 and n_in % 256 == 0 and not kind.order
        is_supported &= kind.scale_dtype in FLOATS
    return is_supported and n_in <= MAX_INPUTS


class Launch(NamedTuple):
    """`gemv.cu`'s macros and arguments, its number of CTAs, and the shared memory of each in bytes."""

    defines: dict[str, int | str]
    arguments: Arguments
    grid: int
    shared: int
    has_idle_warps: bool  # which take more than half of the registers, see SHARED_MEMORY

    def start(self, device: torch.device) -> bool:
        """Launch the kernel. Returns False if it cannot be compiled."""
        load = partial(load_kernel, device, "gemv", **self.defines)
        if is_noted((device, *self.defines.items()), load):
            return True
        kernel = load()
        if kernel is None:
            return False
        warps = int(self.defines["WARPS"])
        if self.has_idle_warps:
            warps = max(WARPS, min(MAX_WARPS, REGISTERS // (2 * 32 * round_up(kernel.registers, 8)) + 1))
        launch(kernel, self.arguments, device, self.grid, warps * 32, self.shared)
        return True


def results_size(links: Sequence[Link]) -> int:
    """Return how many 32-bit words the launch's number and the results of all links but the last take."""
    return 4 + sum(round_up(link.n_out, 4) for link in links[:-1])


@cache
def _results(device: torch.device, size: int, sizes: tuple[int, ...]) -> Tensor:
    """Return what chains with links of these `sizes` pass on. Each launch must write all of it."""
    # If allocated during a capture, they would be filled at each replay.
    assert not torch.cuda.is_current_stream_capturing(), "the first run is in a capture"
    results = torch.zeros(size, dtype=torch.int32, device=device)
    results[0] = 1  # a launch's number, which no result has yet
    return results


class Shape(NamedTuple):
    """`struct Shape` in `gemv.cu`."""

    n_in: int
    rows: int
    has_norm: bool
    gate: str


def plan_sizes(
    shapes: Sequence[Shape], kind: Format, dtype: torch.dtype, warps: int, limit: int, experts: int = 0, top_k: int = 1
) -> tuple[dict[str, int | str], int]:
    """Return the macros, and the shared memory of a CTA, up to `limit`, in bytes.

    A warp's ring has as many stages as fit, and a stage one or two units.
    """
    warp_units = [ceil_div(shape.n_in * kind.bits // 8, UNIT * warps) for shape in shapes]
    units = 2 if kind.bits == 4 or len(shapes) > 1 or warp_units[0] % 2 == 0 else 1
    blocks = max(ceil_div(ceil_div(n, units) * units * (512 // kind.bits), 128) for n in warp_units)
    rows = [shape.rows for shape in shapes]
    # Of a warp's x, group scales and sums, `struct Warp` in `gemv.cu`, and of what a `struct Cta` has beside the warps.
    other = round_up(blocks * 264 + (max(rows[::2]) + max(rows[1::2], default=0)) * 4, 32)
    rest = round_up(round_up(warps * 4, 16) + len(shapes) * 32, 32)
    stage = units * (16 * UNIT + (64 if kind.bits == 4 else 0))
    stages = ((limit - rest) // warps - other) // stage
    texts = (f"{{{n_in},{n},{str(norm).lower()},{GATES.index(gate)}}}" for n_in, n, norm, gate in shapes)
    defines: dict[str, int | str] = {
        "WARPS": warps, "BITS": kind.bits, "IS_FP8": int(kind.name == "fp8"), "UNITS": units, "STAGES": stages,
        "SHAPES": ",".join(texts), "HAS_ZEROS": int(kind.has_zeros), "IS_HALF": int(dtype == torch.float16),
        "SCALE_IS_HALF": int(kind.scale_dtype == torch.float16), "EXPERTS": experts, "TOP_K": top_k,
    }  # fmt: skip
    return defines, warps * (other + stages * stage) + rest


def _address(tensor: Tensor | None, word: int = 0) -> int | None:
    return None if tensor is None else tensor.data_ptr() + 4 * word


def plan_launch(chain: Chain, out: Tensor, results: Tensor | None, num_sms: int) -> Launch:
    """Plan a chain. One of several links needs `results` [results_size] int32."""
    x, links = chain
    first, kind, is_single = links[0], links[0].weight.format, len(links) == 1
    warps = WARPS if is_single or kind.bits == 8 else CHAIN_WARPS
    grid = num_sms * ceil_div(first.n_out, num_sms * MAX_OUTPUTS) if is_single else num_sms
    rows = [ceil_div(ceil_div(link.n_out, grid), 8 if link.gate else 16) * 16 for link in links]
    limit = SHARED_MEMORY[first.norm is not None] if is_single else CHAIN_MEMORY
    shapes = [Shape(i.weight.shape[1], n, i.norm is not None, i.gate) for i, n in zip(links, rows, strict=True)]
    defines, shared = plan_sizes(shapes, kind, x.dtype, warps, limit)
    residual = next((link.norm.residual for link in links if link.norm is not None), None)
    arguments = Arguments(*map(_address, (x, finished(residual), out, results)))
    for i, link in enumerate(links):
        weight, total, (_, norm_weight, eps) = link.weight, link.total, link.norm or (None, None, 0.0)
        stored = None if total is None else total.stored
        tensors = weight.data, weight.scale, weight.zeros, link.bias, norm_weight, stored
        to = _address(results, results_size(links[: i + 1]))
        arguments.links[i] = _Link(*map(_address, tensors), to, link.n_out, eps)
    if first.norm is not None:
        shared = max(shared, MORE_THAN_HALF)
    return Launch(defines, arguments, grid, shared, is_single and first.norm is None)


def plan_experts(
    x: Tensor, experts: Tensor, choices: Tensor, weight: Quantized, out: Tensor, is_down: bool, num_sms: int
) -> Launch:
    """Plan one of the two GEMVs of a token's experts, with weight [E, rows, K]."""
    top_k, n_in, n_out = experts.numel(), x.numel(), out.numel()
    grid = num_sms * ceil_div(n_out, num_sms * MAX_OUTPUTS)
    rows = ceil_div(n_out, grid * 16) * 16 if is_down else ceil_div(n_out, grid * 8) * 16
    shape = Shape(n_in, rows, False, "" if is_down else "silu")
    defines, shared = plan_sizes(
        [shape], weight.format, x.dtype, WARPS, SHARED_MEMORY[not is_down], 2 if is_down else 1, top_k
    )
    arguments = Arguments(*map(_address, (x, experts, out, choices)))
    tensors = weight.data, weight.scale, weight.zeros, None, None, None, None
    arguments.links[0] = _Link(*map(_address, tensors), n_out if is_down else n_out // top_k, 0.0)
    return Launch(defines, arguments, grid, shared if is_down else max(shared, MORE_THAN_HALF), is_down)


def refuses_mixture(m: Mixture) -> str | None:
    """Return why `gemv.cu` does not run a mixture: each expert's columns of down must be those of whole warps."""
    gate_up, down = m.kinds
    if m.gate != "silu" or m.has_bias:
        return "for SwiGLU without biases"
    if gate_up is None or down is None or m.rows != 1:
        return "for one token and quantized experts"
    if not (_supports_matrix(gate_up, m.hidden) and _supports_matrix(down, m.size) and m.dtype in FLOATS):
        return "for scales of rows in 8 bits, or of 128 columns in 4, and tokens in 16 bits"
    columns, unit = m.top_k * m.size, UNIT * WARPS * 8
    is_whole = WARPS % m.top_k == 0 and columns * down.bits % (unit if down.bits == 8 else 2 * unit) == 0
    return None if is_whole and columns <= MAX_INPUTS else "for experts whose columns are those of whole warps"


def cuda_experts(x: Tensor, chosen: Tensor, choices: Tensor, experts: Experts) -> Tensor | None:
    """x [1, H] -> sum over i of choices[i] down[chosen[i]] silu(gate x) (up x) [1, H]; None if it cannot be compiled.

    chosen [1, k] int32, choices [1, k] float32.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized), "`refuses_mixture` has a reason"
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    hidden, out = empty((chosen.numel(), down.shape[2]), dtype=x.dtype, device=x.device), torch.empty_like(x)
    for given, weight, to in ((x, gate_up, hidden), (hidden, down, out)):
        if not plan_experts(given, chosen, choices, weight, to, weight is down, num_sms).start(x.device):
            return None
    return out


def cuda_gemv(
    x: Result, weight: Quantized, bias: Tensor | None, gate: str = "", norm: Norm | None = None
) -> tuple[Result, Result]:
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual), unless `refuses` has a reason.

    Both may be `Deferred`: nothing is launched until a reader asks, or a projection follows that attention reads.
    """
    link = Link(weight, bias, gate, norm)
    chain = x.work if isinstance(x, Deferred) else None
    if not isinstance(chain, Chain) or not chain.fits(link):
        chain = Chain(finished(x))
    if norm is not None and norm.residual is not None:
        link = link._replace(total=ResidualSum(empty(x.shape, dtype=x.dtype, device=x.device)))
    chain = Chain(chain.x, (*chain.links, link))
    out: Deferred = Deferred(chain)
    total: Result = x
    if link.total is not None:
        link.total.chain, total = chain, Deferred(link.total)
    return (out if gate or norm is None else out.finished()), total
