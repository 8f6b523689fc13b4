"""Figures as `benchmarks.offload` measures them, made up."""

from typing import Any

from benchmarks.offload import Measured


def figures(
    plain_bytes: int, peak_bytes: int, times: tuple[float, float, float], moved_bytes: int = 0
) -> dict[str, Any]:
    """Those of a plan whose peak is the predicted one.

    Args:
        plain_bytes: Peak of the plain step.
        peak_bytes: Peak under the plan.
        times: Wall, processor's and predicted time over those of the plain step.
        moved_bytes: Bytes moved.
    """
    wall, processor, predicted = times
    return vars(
        Measured(
            plain_bytes=plain_bytes,
            peak_bytes=peak_bytes,
            predicted_bytes=peak_bytes,
            wall=wall,
            processor=processor,
            predicted=predicted,
            moved_bytes=moved_bytes,
        )
    )
