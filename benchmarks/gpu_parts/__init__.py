"""The parts of ``benchmarks.gpu``: each yields rows, the most important first."""
