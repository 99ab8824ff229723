"""What the compiler says of every Triton kernel of the package, for cards that are not here.

Compiles each kernel for each shape class and generation of cards, and reads from the machine code: registers, stack,
spills, shared memory, and the instructions of each loop. For the scan it adds what these allow: bytes in flight on a
multiprocessor against what the memory's latency asks for, instructions per token and channel against the issue rate,
and the share of memory bandwidth that follows. No card is needed, and nothing here was measured on one.

    python benchmarks/kernel_evidence.py                    with the Triton that is installed: its part of
                                                            reports/kernel_evidence.json, and the page of all parts
    python benchmarks/kernel_evidence.py --capability 90    of one generation only
    python benchmarks/kernel_evidence.py --only chunk step  of kernels with such names only
    python -m tools.triton_versions                         with every version that pyproject.toml admits
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
LATENCY = 700e-9  # seconds that a load from memory takes under load, assumed
ISSUE = 0.85  # share of a scheduler's cycles that issue an instruction while it has a warp, assumed
CHUNK = 4  # tokens of a chunk of the scan
STEP = 8  # tokens of a step of what goes before its chunks, and after them
STALL = 41  # where the second word of an instruction says how many cycles its warp waits before the next one
# name, multiprocessors, clock (Hz), bytes a second, registers of a multiprocessor
CARDS = {
    80: ("A100", 108, 1.41e9, 2.0e12, 65536),
    90: ("H200", 132, 1.98e9, 4.8e12, 65536),
    100: ("B200", 148, 1.97e9, 8.0e12, 65536),
}
SHOWN = 90  # the card that the page is about; the JSON has all
MANY = 128  # registers of a thread: with more, fewer than four programs of four warps fit a multiprocessor
SHAPES = {"B=8, L=2048, D=1536": (8, 2048, 1536), "B=1, L=65536, D=1536": (1, 65536, 1536)}
IN_INPUT_DTYPE = {"x", "beta_logit", "z", "k", "q", "u", "grad_o", "o", "dx", "dlogit", "dz", "dk", "dq"}
IN_INPUT_DTYPE |= {"grad_y", "y", "weight", "columns", "grad_columns", "rows", "drows", "parameters"}
SCANS = ("forward_kernel", "backward_kernel", "chunk_backward_kernel")
FILE = ROOT / "reports" / "kernel_evidence.json"
FIELDS = ("op", "kernel", "class", "sm", "triton", "sizes", "registers", "stack", "shared", "warps", "instructions")
FIELDS += ("inner loops", "cycles of a warp in inner loops", "skipped in inner loops", "spills in inner loops")
FIELDS += ("spills", "bytes in inner loops")
BYTES = ("least", "checkpoints", "keys and queries", "scratch", "parts of dk, dq")
IN_FLOAT32 = ("linear_scan", "long_conv")  # ops that convert what they are given before the launch
TYPES = {"seq_idx": "*i64", "lengths": "*i64", "pages": "*i64", "decay": "*fp64"}
NUMBER = r"L|size|\w+_(row|step)"  # the first of a kernel's numbers, which follow its pointers
ALIGNED = r"\w+_(row|step|filter|states|channels)|channels|padded|size|W"  # of the numbers: multiples of 16


def compile_for(kernel, capability: int, constants: dict, *, dtype: str = "bf16", **options):
    """The compiled kernel, its pointers and strides as aligned as those of whole tensors; needs no card."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = types(kernel, dtype)
    constants = {name: constants.get(name, True) for name, what in signature.items() if what == "constexpr"}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, what) in enumerate(signature.items())
        if what.startswith("*") or (what == "i32" and re.fullmatch(ALIGNED, name))
    }
    target = GPUTarget("cuda", capability, 32)
    options = {"enable_fp_fusion": True, **options}
    return compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


def types(kernel, dtype: str) -> dict[str, str]:
    """The type of each parameter of a kernel: pointers come first, then numbers, then constants."""
    inputs = () if kernel.fn.__module__.split(".")[-2] in IN_FLOAT32 else IN_INPUT_DTYPE
    found, pointer = {}, True
    for parameter in kernel.params:
        name = parameter.name
        pointer = pointer and not re.fullmatch(NUMBER, name)
        found[name] = TYPES.get(name, f"*{dtype}" if name in inputs else "*fp32") if pointer else "i32"
        if parameter.is_constexpr:
            found[name] = "constexpr"
    return found


def kernels_of(module: ModuleType) -> dict:
    """The kernels of a module that are its own, by name."""
    found = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    return {name: kernel for name, kernel in found.items() if kernel.fn.__module__ == module.__name__}


def cases() -> Iterator[tuple[str, str, object, dict]]:
    """Op, shape class, kernel and constants, num_warps among them, of everything that is launched."""
    import torch

    from hf_hybrid_ssm.ops.causal_conv import triton as conv
    from hf_hybrid_ssm.ops.implicit_attention import triton as implicit
    from hf_hybrid_ssm.ops.implicit_attention import triton_kernels as implicit_kernels
    from hf_hybrid_ssm.ops.linear_scan import triton as linear
    from hf_hybrid_ssm.ops.linear_scan import triton_channel_kernels
    from hf_hybrid_ssm.ops.long_conv import triton as long_conv
    from hf_hybrid_ssm.ops.longhorn_scan import triton as scan
    from hf_hybrid_ssm.ops.longhorn_scan import (
        triton_backward_kernels,
        triton_chunk_kernels,
        triton_chunk_summary_kernels,
        triton_kernels,
        triton_sizes,
    )
    from hf_hybrid_ssm.ops.longhorn_scan import triton_step as scan_step
    from hf_hybrid_ssm.ops.longhorn_scan import triton_step_kernels as scan_step_kernels

    plain = {"HAS_DOCUMENTS": False, "WIDTH": triton_sizes.WIDTH}
    shared = {"T": scan.SHARED_TOKENS, "BN": 16, "num_warps": 4}
    others = {
        "prepare_kernel": shared,
        "finish_kernel": shared,
        "chain_kernel": {"BLOCK": scan.CHAIN_BLOCK, "num_warps": 4},
    }
    for states in (16, 32, 64):
        for module, backward in ((triton_kernels, False), (triton_backward_kernels, True)):
            for name, kernel in kernels_of(module).items():
                sizes = others.get(name) or triton_sizes.tile_sizes(states, backward=backward)
                if name not in others:
                    yield "longhorn_scan", f"N={states}", kernel, plain | sizes
                elif states == 16:
                    yield "longhorn_scan", "", kernel, plain | sizes | {"HAS_DOCUMENTS": True}
        if chunks := triton_sizes.chunk_sizes(states, "torch.bfloat16"):
            for module in (triton_chunk_kernels, triton_chunk_summary_kernels):
                for kernel in kernels_of(module).values():
                    yield "longhorn_scan", f"N={states}", kernel, plain | chunks
        for kernel in kernels_of(scan_step_kernels).values():
            yield "longhorn_step", f"N={states}", kernel, scan_step.tile_sizes(states)
    for kernel in kernels_of(conv).values():
        tile = {conv.forward_kernel: conv.TILE, conv.backward_kernel: conv.BACKWARD_TILE}.get(kernel, conv.STEP_TILE)
        op = "causal_conv_step" if kernel is conv.step_kernel else "causal_conv"
        yield op, "K=4", kernel, {"K": 4, **tile}
    for inputs, precision in (("float32", "tf32x3"), ("bfloat16", "tf32")):
        yield "long_conv", inputs, long_conv.toeplitz_kernel, long_conv.TILE | {"PRECISION": precision}
    for states in (8, 16, 32):
        for kernel in kernels_of(triton_channel_kernels).values():
            yield "linear_scan", f"N={states}", kernel, linear.channel_tile(states)
    yield "linear_scan", "", linear.diagonal_kernel, dict(linear.DIAGONAL_TILE)
    for order, rows in ((50, 5), (220, 22)):
        for name, kernel in kernels_of(implicit_kernels).items():
            sizes = implicit.attention_tile(rows, torch.bfloat16) | {"SCALE": 1.0}
            sizes = implicit.memory_tile(order) if name.startswith("memory") else sizes
            yield "implicit_attention", f"q={order}, q'={rows}", kernel, sizes | {"C": implicit.BLOCK}


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def read_machine_code(compiled) -> dict:
    """Registers, bytes of stack, instructions, and those of each loop: of the loop itself, without loops inside it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = {"capture_output": True, "text": True, "check": True}
        usage = subprocess.run([tool("cuobjdump"), "-res-usage", file.name], **run).stdout
        text = subprocess.run([tool("nvdisasm"), "-c", "-hex", file.name], **run).stdout
    labels, instructions, cycles = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
        elif (word := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line)) and len(cycles) < len(instructions):
            cycles.append(max(1, int(word[1], 16) >> STALL & 15))  # until the same warp may issue again
    loops, skips, lanes = [], [], 32 * compiled.metadata.num_warps
    body = instructions.index("EXIT") if "EXIT" in instructions else len(instructions)
    for here, instruction in enumerate(instructions[:body]):  # after it are only what waits, and jumps back
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        there = labels.get(target[1], here) if target else here
        if there < here:
            loops.append((there, here + 1))
        elif there > here:
            skips.append((here + 1, there))
    loops = sorted(loop for loop in loops if loop[1] - loop[0] > 8)
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    skips = [[skip for skip in skips if start <= skip[0] and skip[1] <= end] for start, end in inner]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "instructions": len(instructions),
        "inner loops": [end - start for start, end in inner],
        "cycles of a warp in inner loops": [sum(cycles[start:end]) for start, end in inner],
        "skipped in inner loops": [sum(end - start for start, end in loop) for loop in skips],
        "spills in inner loops": sum(_is_local(i) for start, end in inner for i in instructions[start:end]),
        "spills": sum(map(_is_local, instructions)),
        "bytes in inner loops": sum(lane_bytes(instructions[start:end]) for start, end in inner) * lanes,
    }


def lane_bytes(instructions: list[str]) -> int:
    """What one lane reads from and writes to memory if it takes every one of these instructions, caches included."""
    moves = (re.search(r"\b(LDGSTS|LDG|STG|RED|ATOMG)\.(\S+)", instruction) for instruction in instructions)
    return sum(_width(found[2]) for found in moves if found)


def _width(modifiers: str) -> int:
    """Of LDG.E.64, LDG.E.U16 and so on, in bytes."""
    for name, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if name in modifiers.split("."):
            return width
    return 4


def _opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def _is_local(instruction: str) -> bool:
    return _opcode(instruction) in ("LDL", "STL")


def bandwidth(
    report: dict, sizes: dict, capability: int, shape: tuple[int, int, int], *, backward: bool, chunks: bool = False
) -> dict:
    """What the machine code of the scan allows at (B, L, D), bfloat16, with a gate: see the page."""
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

    _, processors, clock, rate, registers = CARDS[capability]
    (batch, length, channels), warps = shape, sizes["num_warps"]
    programs = batch * math.ceil(channels / sizes["BD"])
    splits = triton_sizes.time_splits(programs * warps * 32, length, processors, backward)
    resident = min(
        registers // (report["registers"] * 32 * warps), 227 * 1024 // max(report["shared"], 1024), 64 // warps
    )
    on_one = math.ceil(programs * splits / processors)
    waves = [resident] * (on_one // resident) + [on_one % resident]  # programs that are on a multiprocessor together
    busiest = (math.ceil(programs * warps / 4) for programs in waves if programs)  # warps of one scheduler
    issued, waited = report["inner instructions per tile"] / ISSUE, report["inner cycles per tile"]
    cycles = sum(max(number * issued, waited) for number in busiest) * math.ceil(length / splits / sizes["T"])
    busy = min(on_one, resident)
    tiles_in_flight = busy * (sizes["STAGES"] - 1) * sizes["BD"] * sizes["T"] * 2 * (4 if backward else 3)
    least = batch * length * channels * 2 * (7 if backward else 4)  # bytes that have to move
    ideal = least / rate
    second = 1.0 if splits == 1 else 1.0 + report["summary share"]
    by_issue = ideal / (cycles * second / clock)
    by_latency = tiles_in_flight / (rate * LATENCY / processors)
    moved = scan_bytes(sizes, backward=backward, chunks=chunks)
    by_bytes = moved["least"] / sum(moved[name] for name in moved if name != "keys and queries")
    return {
        "splits": splits,
        "microseconds at least": round(ideal * 1e6, 1),
        "instructions per token and channel": round(
            report["inner instructions per tile"] / sizes["T"] * warps * 32 / sizes["BD"], 1
        ),
        "bytes in flight": tiles_in_flight,
        "bytes wanted": round(rate * LATENCY / processors),
        "share by issue": round(min(1.0, by_issue), 3),
        "share by bytes in flight": round(min(1.0, by_latency), 3),
        "share by bytes moved": round(by_bytes, 3),
        "share": round(min(1.0, by_issue, by_latency, by_bytes), 3),
    }


def evidence(capabilities: list[int], only: list[str]) -> list[dict]:
    """A record of each kernel, class and generation; of those alone whose name has one of some words."""
    import triton

    records = []
    for capability in capabilities:
        for op, shape_class, kernel, constants in cases():
            if only and not any(word in kernel.fn.__name__ for word in only):
                continue
            options = {"num_warps": constants.get("num_warps", 4)}
            report = read_machine_code(compile_for(kernel, capability, constants, **options))
            name = {"op": op, "kernel": kernel.fn.__name__, "class": shape_class, "sm": capability}
            name["triton"] = triton.__version__
            records.append({**name, "sizes": _plain_sizes(constants), **report})
            print(
                f"{op} {name['kernel']} {shape_class} sm_{capability}: {report['registers']} registers",
                file=sys.stderr,
            )
    return records


def add_shares(records: list[dict]) -> None:
    """To those of the scan's kernels, what the records of all allow."""
    for record in records:
        if record["op"] == "longhorn_scan" and record["kernel"] in SCANS:
            record["bandwidth"] = _scan_shares(record, records)


def _plain_sizes(constants: dict) -> dict:
    return {name: value for name, value in constants.items() if type(value) is int}


def scan_bytes(sizes: dict, *, backward: bool, chunks: bool = False) -> dict[str, float]:
    """What the scan moves for a token and a channel in bfloat16 with a gate, by what it is for.

    `least` has to move: forward x, logit, z and o; backward x, logit and z twice, and the output's gradient. The rest
    is how the kernels work: checkpoints of the state, keys and queries in float32 (of each tile of channels, from the
    caches), and backward the states between the checkpoints and each tile's parts of the sums over channels (both
    written and read). In chunks, three numbers of each token and channel go to the scratch and three come from it.
    """
    states, tile = sizes.get("N") or sizes["S"] * sizes["P"], sizes["BD"]
    found = {
        "least": 2.0 * (7 if backward else 4),
        "checkpoints": 4 * states / sizes["BLOCK"],
        "keys and queries": 4 * (4 if backward else 2) * states / tile,
    }
    if backward:
        found["scratch"] = 2 * 4 * (states / CHUNK + 6 if chunks else states / sizes["T"])
        found["parts of dk, dq"] = 2 * 4 * (2 * states + 1) / tile
    return found


def implicit_bytes(order: int, rows: int, *, block: int = 32, tile: int = 128, shared: int = 227 * 1024) -> dict:
    """What the forward of implicit attention moves for a token and channel in bfloat16, and the least it could.

    `now`: x, the columns (memory and tokens of each block, written and read), the rows of queries, keys and values
    (written and read), and y. The logits of a token are sums over all channels, so that no program that has a tile of
    them can go from x to y alone; `fused` is what two kernels would move that both go from x to the rows again: x
    twice, y, and each tile's part of the logits (written and read). And the matrix that reads the memories out, which
    all columns share: `matrix` is what of it comes from the caches if the columns fill the memory that a
    multiprocessor shares; 0 if that has room for the matrix itself, and for the columns of a tile.
    """
    height = -(-order // 8) * 8 + block
    size = 2 * 3 * rows * block * height
    fits = size + 2 * height * tile <= shared
    return {
        "now": 2 + 2 * 2 * height / block + 2 * 2 * 3 * rows + 2,
        "fused": 2 * 2 + 2 + 2 * 4 * rows**2 / tile,
        "matrix": 0.0 if fits else size / block / (shared // (2 * height)),
    }


def _scan_shares(record: dict, records: list[dict]) -> dict:
    chunks, backward = record["kernel"] == "chunk_backward_kernel", record["kernel"] != "forward_kernel"
    sizes = record["sizes"] | ({"T": STEP} if chunks else {})
    inner = _of_tile(record, "inner loops", chunks)
    if not backward:  # a checkpoint is written once a block
        inner -= sum(record["skipped in inner loops"]) * (1 - sizes["T"] / sizes["BLOCK"])
    second = of_first_pass(_first_pass(record, records)) / (inner / sizes["T"] * record["warps"] * 32 / sizes["BD"])
    report = record | {"inner instructions per tile": inner, "summary share": second}
    report["inner cycles per tile"] = _of_tile(record, "cycles of a warp in inner loops", chunks)
    return {
        shape: bandwidth(report, sizes, record["sm"], numbers, backward=backward, chunks=chunks)
        for shape, numbers in SHAPES.items()
    }


def _first_pass(record: dict, records: list[dict]) -> dict:
    """The first pass over a row that is cut, before this kernel: in chunks before the backward in chunks, and before
    the forward where there is such a pass."""
    of = {name: record[name] for name in ("op", "sm", "triton", "class")}
    direction = "forward" if record["kernel"] == "forward_kernel" else "backward"
    by_token, in_chunks = (
        [r for r in records if (of | {"kernel": f"{direction}{kind}_summary_kernel"}).items() <= r.items()]
        for kind in ("", "_chunk")
    )
    return (in_chunks or by_token)[0] if record["kernel"] != "backward_kernel" else by_token[0]


def of_first_pass(record: dict) -> float:
    """Instructions of such a pass for a token and channel."""
    tokens = record["sizes"].get("T", STEP)
    count = _of_tile(record, "inner loops", "T" not in record["sizes"])
    return count / tokens * record["warps"] * 32 / record["sizes"]["BD"]


def _of_tile(record: dict, name: str, chunks: bool) -> float:
    """The sum over loops; in chunks for a step, of which a loop over chunks takes two turns."""
    loops = record[name]
    if not chunks:
        return sum(loops)
    if len(loops) != (4 if record["kernel"] == "chunk_backward_kernel" else 2):
        raise ValueError(f"{record['kernel']} should have loops before, over and after its chunks; found {loops}")
    before, *over, after = loops if len(loops) == 4 else [*loops, 0]
    return before + sum(over) * (STEP // CHUNK) + after


PAGE = f"""
The compiler's report on every Triton kernel of the package, for cards that were not there: **nothing on this page
was measured on one.** Spills are reads and writes of local memory, in brackets those inside inner loops. The linear
scans are compiled for complex states with every option on.

With 32 and 64 states the scan's `backward_kernel` is launched for float32 alone: it stands here to be compared with
`chunk_backward_kernel`, which goes in chunks of {CHUNK} tokens.

Shares of memory bandwidth are estimates for bfloat16 with a gate. The bytes that have to move (forward x, logit, z, o;
backward twice x, logit, z and the output's gradient) over the time that the inner loops take on the busiest scheduler:
that of its warps' instructions if it issues in {ISSUE:.0%} of its cycles, or, where that is longer, the cycles that
the compiler makes a single warp wait between them for its own results (without waits for memory). And bytes of tiles
in flight on a multiprocessor over those that {LATENCY * 1e9:.0f} ns of latency ask for (Little's law). The smaller
share counts, or that of the least bytes among all that are moved, where that is smaller. Programs that find no room on
a multiprocessor run after the others; a row that is cut into splits pays for a second pass. A multiply-add of a lane
counts as one instruction: with 4 for each state the recurrence alone takes 64 at N = 16, its gradients, with the
states computed twice, 16 for each state and 256. Sizes, and all figures, are in
`kernel_evidence.json`.
"""


def read_records() -> list[dict]:
    """What is on record: a line of names, and one of values for each kernel."""
    if not FILE.is_file():
        return []
    fields, *rows = json.loads(FILE.read_text(encoding="utf-8"))
    return [dict(zip(fields, row)) for row in rows]


def merged(records: list[dict]) -> list[dict]:
    """With those of other versions of Triton that are recorded, oldest version first."""
    known = read_records()
    of = itemgetter("triton", "sm", "op", "kernel", "class")
    new = set(map(of, records))
    kept = [r for r in known if of(r) not in new]
    both = sorted(kept + records, key=lambda r: [int(part) for part in r["triton"].split(".")])
    add_shares(both)
    return both


def write_page(records: list[dict]) -> None:
    sys.path.insert(0, str(ROOT))
    from tests import reporting

    records = merged(records)
    versions = list(dict.fromkeys(r["triton"] for r in records))
    newest = [r for r in records if r["triton"] == versions[-1]]
    ops = ROOT / "src/hf_hybrid_ssm/ops"
    kernels = sorted(path.relative_to(ROOT).as_posix() for path in ops.rglob("triton*.py"))
    about = (*kernels, "benchmarks/kernel_evidence.py")
    made = reporting.made_by("python -m tools.triton_versions", about)
    lines = [json.dumps(row, separators=(",", ":")) for row in [FIELDS, *([r[f] for f in FIELDS] for r in records)]]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    columns = ("registers", "stack", "shared", "warps", "instructions")
    rows = (
        [f"{r['op']}.{r['kernel']}", r["class"], *(r[c] for c in columns),
         f"{r['spills']} ({r['spills in inner loops']})", " + ".join(map(str, r["inner loops"]))]
        for r in newest if r["sm"] == SHOWN and (r["spills"] or r["registers"] > MANY)
    )  # fmt: skip
    shares = (
        [r["kernel"], r["class"], shape, r["triton"], b["splits"], b["microseconds at least"],
         b["instructions per token and channel"], f"{b['bytes in flight']:,} of {b['bytes wanted']:,}",
         f"{b['share by issue']:.0%}", f"{b['share by bytes in flight']:.0%}", f"{b['share by bytes moved']:.0%}",
         f"{b['share']:.0%}"]
        for r in records if r["sm"] == SHOWN
        for shape, b in r.get("bandwidth", {}).items()
    )  # fmt: skip
    head = ["kernel", "class", *columns, "spills", "inner loops, instructions"]
    share_head = ["scan", "class", "shape", "Triton", "splits", "least µs", "instructions a token and channel"]
    share_head += ["bytes in flight", "by issue", "by bytes in flight", "by bytes moved", "share of bandwidth"]
    title = f"## The scan's share of bandwidth on {CARDS[SHOWN][0]}, on paper"
    parts = (PAGE.strip(), title, reporting.table(share_head, shares))
    moved = (
        [r["kernel"], r["class"], *(f"{found.get(name, 0):g}" for name in BYTES), f"{sum(found.values()):g}"]
        for r in newest if r["sm"] == SHOWN and "bandwidth" in r
        for found in [
            scan_bytes(
                r["sizes"], backward=r["kernel"] != "forward_kernel", chunks=r["kernel"] == "chunk_backward_kernel"
            )
        ]
    )  # fmt: skip
    moved_head = ["scan", "class", *BYTES, "all"]
    parts += ("## Bytes that the scan moves for a token and channel", reporting.table(moved_head, moved))
    orders = ((50, 5), (220, 22))
    moved = (
        [f"q={order}, q'={rows}", *(f"{value:.3g}" for value in implicit_bytes(order, rows).values())]
        for order, rows in orders
    )
    parts += (
        "## Bytes that implicit attention moves for a token and channel, forward",
        "Attention among the rows of a token sums over all channels, so that no kernel with a tile of them goes from "
        "x to y: two kernels could, which both read the memories out. For q = 50 they would move less than 16 bytes; "
        "they are not written. For q = 220 the matrix that reads the memories out does not fit into the memory that a "
        "multiprocessor shares, and comes from the caches again for every tile.",
        reporting.table(["class", "now", "of two fused kernels", "of their matrix, from caches"], moved),
    )
    full = f"## Kernels that spill, or take more than {MANY} registers, on sm_{SHOWN} by Triton {versions[-1]}"
    parts += (full, reporting.table(head, rows))
    each: dict[tuple, dict] = {}
    for r in records:
        figures = f"{r['registers']}, {r['spills']} ({r['spills in inner loops']}), "
        figures += f"{' + '.join(map(str, r['inner loops'])) or 'no loop'}, {r['bytes in inner loops']:,}"
        each.setdefault((f"{r['op']}.{r['kernel']}", r["class"], f"sm_{r['sm']}"), {})[r["triton"]] = figures
    every = ([*key, *(found.get(version, "") for version in versions)] for key, found in each.items())
    parts += (
        "## Every kernel with every version of Triton",
        "Registers; spills (those in inner loops); instructions of each inner loop; bytes that a program's loads and "
        "stores in inner loops name if each is done once, caches and what masks leave out included.",
        reporting.table(["kernel", "class", "card", *(f"Triton {version}" for version in versions)], every),
    )
    reporting.write_page("kernel_evidence.md", "Triton kernels: what the compiler says", made, *parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capability", type=int, choices=CARDS, action="append", help="only this one; may be repeated"
    )
    parser.add_argument("--only", nargs="+", default=[], help="only kernels with one of these words in their names")
    options = parser.parse_args()
    write_page(evidence(options.capability or list(CARDS), options.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
