"""What is run, and how a process that runs it ends: known before anything heavy is imported."""

# in this order: what is wrong is found before anything is timed, and what matters most is timed first
PARTS = {
    "doctor": "what is installed, and every kernel's self-check",
    "peaks": "copy bandwidth and rate of matrix products",
    "parity": "every kernel against float64",
    "scan": "the Longhorn scan",
    "decoding": "a decoded token",
    "training": "a training step and its memory",
    "models": "every family against the CPU",
    "syncs": "nothing waits for the GPU",
    "window_attention": "window attention",
    "long_convolution": "the long convolution",
    "learning": "loss curves of short runs",
}
INTERPRETED = ("doctor", "parity")  # of a rehearsal; the rest runs in torch
DONE, OUT_OF_TIME, FATAL = 0, 3, 4
