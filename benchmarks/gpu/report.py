"""One page from the results of all parts: what failed, and every figure with its ratios and shares of the peaks."""

import platform
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store
from benchmarks.table_text import markdown_table
from benchmarks.timing import provenance

ABOUT = ("src/hf_hybrid_ssm/ops", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/models", "benchmarks/gpu")
Cases = dict[str, dict]


def summary(store: Store) -> str:
    counts = [(len(cases), len(failures(cases))) for cases in map(store.cases, PARTS)]
    return f"{sum(total for total, _ in counts)} cases, {sum(failed for _, failed in counts)} failed"


def write_report(store: Store, settings: Settings, root: Path) -> Path:
    """root/reports/gpu.md."""
    found = {part: store.cases(part) for part in PARTS}
    text = "\n".join(["# On a GPU", "", made(store, settings), "", overview(found, store)])
    for part, cases in found.items():
        table = TABLES.get(part, lambda *_: "")(cases, found["peaks"])
        if table or failures(cases):
            text += f"\n## {part.replace('_', ' ').capitalize()}: {PARTS[part]}\n\n{table}{failed(cases)}"
    path = root / "reports" / "gpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def made(store: Store, settings: Settings) -> str:
    commit = str(provenance()["commit"])
    changed = " and uncommitted changes" if commit.endswith("+") else ""
    command = "python -m benchmarks.gpu --device cpu --rehearse" if settings.rehearse else "make gpu"
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


def overview(found: dict[str, Cases], store: Store) -> str:
    """Of each part; results that another device or a change of the sources put aside are in the part's file alone."""
    rows = [
        [
            part.replace("_", " "),
            len(cases),
            len(failures(cases)),
            f"{sum(c['wall_seconds'] for c in timed(cases)):.0f}",
            len(store.superseded(part)),
        ]
        for part, cases in found.items()
    ]
    return markdown_table(["part", "cases", "failed", "seconds", "superseded"], rows)


def timed(cases: Cases) -> list[dict]:
    return [found for found in cases.values() if "wall_seconds" in found]


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
    rows = [[name, f"{found['logits']:.1e}", f"{found['gradients']:.1e}"] for name, found in good(cases).items()]
    return markdown_table(["model", "logits", "worst gradient"], rows)


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


def attention(cases: Cases, peak: Cases) -> str:
    limit = peak.get("product bfloat16", {}).get("teraflops")
    others = list(dict.fromkeys(name for found in good(cases).values() for name in found["time_over_ours"]))
    rows = [
        [
            name,
            f"{found['milliseconds']['ours']:.3f}",
            share(found["teraflops"], limit),
            f"{found['peak_megabytes']:,.0f}",
            *(f"{found['time_over_ours'][other]}x" if other in found["time_over_ours"] else "" for other in others),
        ]
        for name, found in good(cases).items()
    ]
    head = ["case", "ms", "of the products' rate", "peak MB", *(f"time of {name}" for name in others)]
    return markdown_table(head, rows)


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
        rows.append(
            [
                name,
                f"{found['tokens_per_second']:,}",
                f"{found['time_over_ours'].get('Llama', '')}x",
                share(found["teraflops"], limit),
                f"{ours:,}",
                f"{llama:,}",
            ]
        )
    head = ["model, rows", "tokens / s", "times as fast as Llama", "of the products' rate", "peak MB", "Llama's"]
    return markdown_table(head, rows)


def learning(cases: Cases, _: Cases) -> str:
    rows = [
        [name, found["bfloat16"][0], *found["last_quarter"], f"{found['gap']:.1%}"]
        for name, found in good(cases).items()
    ]
    return markdown_table(["model", "first steps", "last quarter, bfloat16", "float32 on a CPU", "apart by"], rows)


def share(rate: float | None, limit: float | None) -> str:
    return f"{rate / limit:.0%}" if rate is not None and limit else ""


TABLES = {
    "peaks": peaks,
    "parity": parity,
    "models": models,
    "scan": bandwidth,
    "long_convolution": bandwidth,
    "window_attention": attention,
    "decoding": decoding,
    "training": training,
    "learning": learning,
}
