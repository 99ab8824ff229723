"""One page from the results of all parts: what failed, and every figure with its ratios and shares of the peaks."""

import platform
import re
from importlib.metadata import version

from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store
from benchmarks.table_text import markdown_table
from benchmarks.timing import provenance

ABOUT = ("src/hf_hybrid_ssm/ops", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/models", "benchmarks/gpu")
Cases = dict[str, dict]


def asked_of(store: Store, chosen: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The cases that were asked for, by name: those that failed, and those that have not run."""
    every = {f"{part}: {case}" for part, cases in store.names().items() for case in cases}
    found = {f"{part}: {case}" for part in PARTS for case in store.cases(part)}
    waiting = [name for name in every - found if chosen.search(name)]
    if not waiting and not any(map(chosen.search, found)):
        raise ValueError(f"--cases {chosen.pattern!r} is found in no case")
    return [name for name in store.failures() if chosen.search(name)], waiting


def page(store: Store, settings: Settings) -> str:
    found = {part: store.cases(part) for part in PARTS}
    text = "\n".join(["# On a GPU", "", made(store, settings), "", overview(store), ""])
    for part, cases in found.items():
        table = TABLES.get(part, lambda *_: "")(cases, found["peaks"])
        if table or failures(cases):
            text += f"\n## {part.capitalize()}: {PARTS[part].about}\n\n{table}{failed(cases)}"
    return text


def made(store: Store, settings: Settings) -> str:
    commit = str(provenance()["commit"])
    changed = " and uncommitted changes" if commit.endswith("+") else ""
    command = "bash tools/card.sh" + (" --device cpu --rehearse" if settings.rehearse else "")
    versions = f"python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    about = ", ".join(f"`{path}`" for path in ABOUT)
    where = "a CPU, with tiny sizes: nothing here is a measurement" if settings.rehearse else store.identity["device"]
    return (
        f"Made by `{command}` from commit `{commit.rstrip('+')}`{changed} with {versions}, on {where}. About: {about}."
    )


def failures(cases: Cases) -> Cases:
    return {name: found for name, found in cases.items() if "error" in found}


def failed(cases: Cases) -> str:
    return "".join(f"- {name}: `{found['error']}`\n" for name, found in failures(cases).items())


def overview(store: Store) -> str:
    names = store.names()
    rows = []
    for part in PARTS:
        cases = store.cases(part)
        waiting = len(set(names.get(part, [])) - set(cases))
        seconds, compiled = (
            sum(each.get(key, 0) for each in cases.values()) for key in ("wall_seconds", "programs_compiled")
        )
        rows.append([part, len(cases), len(failures(cases)), waiting, f"{seconds:.0f}", compiled])
    return markdown_table(["part", "cases", "failed", "to be run", "seconds", "programs compiled"], rows)


def good(cases: Cases) -> Cases:
    return {name: found for name, found in cases.items() if "error" not in found}


def peaks(cases: Cases, _: Cases) -> str:
    rows = [
        [name, f"{found['gigabytes_per_second']:,} GB/s" if name == "copy" else f"{found['teraflops']:,} TFLOP/s"]
        for name, found in good(cases).items()
    ]
    return markdown_table(["measured", "rate"], rows)


def parity(cases: Cases, _: Cases) -> str:
    rows = [[name, f"{found['largest_error']:.1e}", f"{found['bound']:.0e}"] for name, found in good(cases).items()]
    return markdown_table(["kernel", "largest relative error", "bound"], rows)


def models(cases: Cases, _: Cases) -> str:
    dtypes = ("float32", "bfloat16")
    rows = [
        [name, *(f"{found[dtype][of]:.1e}" for dtype in dtypes for of in ("outputs", "gradients"))]
        for name, found in good(cases).items()
    ]
    return markdown_table(["model", *(f"{of}, {dtype}" for dtype in dtypes for of in ("outputs", "gradient"))], rows)


def bandwidth(cases: Cases, peak: Cases) -> str:
    """A kernel's milliseconds, its share of the copy's bandwidth, and the others' time over its own."""
    limit = peak.get("copy", {}).get("gigabytes_per_second")
    others = list(dict.fromkeys(name for found in good(cases).values() for name in found["time_over_ours"]))
    rows = [
        [
            name,
            f"{found['milliseconds']['ours']:.3f}",
            share(found.get("gigabytes_per_second"), limit),
            *(f"{found['time_over_ours'][other]}x" if other in found["time_over_ours"] else "" for other in others),
        ]
        for name, found in good(cases).items()
    ]
    return markdown_table(["case", "ms", "of the copy's bandwidth", *(f"time of {name}" for name in others)], rows)


def decoding(cases: Cases, peak: Cases) -> str:
    limit = peak.get("copy", {}).get("gigabytes_per_second")
    found = good(cases)
    rows = []
    for name, figures in found.items():
        llama = found.get(f"Llama, {name.split(', ')[1]}", {}).get("milliseconds_per_token")
        ratio = f"{figures['milliseconds_per_token'] / llama:.2f}x" if llama else ""
        rate = share(figures["gigabytes_per_second"], limit)
        rows.append([name, f"{figures['milliseconds_per_token']:.3f}", rate, ratio])
    return markdown_table(["model, how", "ms / token", "of the copy's bandwidth", "time over Llama's"], rows)


def training(cases: Cases, peak: Cases) -> str:
    limit = peak.get("product bfloat16", {}).get("teraflops")
    rows = []
    for name, found in good(cases).items():
        ours, llama = found["peak_megabytes"].values()
        ratio, rate = f"{found['time_over_ours'].get('Llama', '')}x", share(found["teraflops"], limit)
        rows.append([name, f"{found['tokens_per_second']:,}", ratio, rate, f"{ours:,}", f"{llama:,}"])
    head = ["model, rows", "tokens / s", "times as fast as Llama", "of the products' rate", "peak MB", "Llama's"]
    return markdown_table(head, rows)


def share(rate: float | None, limit: float | None) -> str:
    return f"{rate / limit:.0%}" if rate is not None and limit else ""


TABLES = {
    "peaks": peaks,
    "parity": parity,
    "models": models,
    "scan": bandwidth,
    "decoding": decoding,
    "training": training,
}
