"""The decomposition methods, one file each, by name."""

from __future__ import annotations

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition.methods.base import Candidate, KeepDenseError, MatrixMethod, Method, Ranks, RankTable
from ctdr_lightning.decomposition.methods.cp import CP, CP4
from ctdr_lightning.decomposition.methods.spatial import Spatial
from ctdr_lightning.decomposition.methods.svd import SVD
from ctdr_lightning.decomposition.methods.tt import TT
from ctdr_lightning.decomposition.methods.tt_linear import TTLinear
from ctdr_lightning.decomposition.methods.tucker import Tucker
from ctdr_lightning.decomposition.shapes.geometry import Geometry

__all__ = ["METHODS", "Candidate", "KeepDenseError", "MatrixMethod", "Method", "RankTable", "Ranks", "method_for"]

METHODS: Registry[Method] = Registry("method", group="ctdr_lightning.methods")
for _method in (SVD(), Tucker(), CP(), CP4(), TT(), TTLinear(), Spatial()):
    METHODS.register(_method.name)(_method)


def method_for(name: str, geometry: Geometry) -> Method:
    """The method of that name, or its equivalent on a matrix (Tucker and CP of a matrix are its SVD)."""
    method = METHODS[name]
    while not method.supports(geometry):
        method = METHODS[method.matrix_method]
    return method
