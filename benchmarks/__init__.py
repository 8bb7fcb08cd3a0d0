"""Benchmarks of the training step against a plainly written dense one; see README.md."""
