"""Weights: parameters, their quantization, and the bytes on each rank."""
