"""A few scans, forward and backward, and nothing else: what a profiler or a sanitizer of NVIDIA's is run on.

ncu --clock-control none python -m benchmarks.gpu.one_scan
compute-sanitizer --tool racecheck python -m benchmarks.gpu.one_scan --shape 1 128 64 16
"""

import argparse
import sys

import torch

from benchmarks.gpu.scan import SHAPES, longhorn, with_block
from benchmarks.gpu.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=SHAPES[0], metavar=("BATCH", "LENGTH", "CHANNELS", "N"))
    parser.add_argument("--block", type=int, choices=(64, 32, 16), default=64, help="tokens between checkpoints")
    parser.add_argument("--times", type=int, default=3, help="the first one loads the programs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU")
    settings = Settings(options.device, False)
    kernel = "triton" if options.device == "cuda" else "torch"
    scan = longhorn(settings, tuple(options.shape), True, kernel)
    run = with_block(scan, options.shape[3], options.block, settings) if kernel == "triton" else scan
    for _ in range(options.times):
        run()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
