"""The lowest level: functions from tensors to tensors.

Layout (batch, length, channels); dimension letters B batch, L length, D channels, N state size, H heads, W window,
C block length, K short-convolution width. Every op has a float64 reference that reads like the paper's equation.
"""
