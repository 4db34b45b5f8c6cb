"""Which bytes a launch should reach, by its views, and which it did reach, by looking.

*Predicted*: the bytes that the views give to the slots written. *Observed*: the same run over buffers filled
with 0x00 and with 0xFF; a byte that keeps its filling in both was not reached. A byte written with the value
that it had cannot hide, since it cannot have had both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvviz.audit.view import View

FILLS = (0x00, 0xFF)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Predicted against observed bytes of all storages; each array is bool, one entry a byte, by storage name.

    A storage that only one side names counts as all False on the other.
    """

    predicted: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]

    @property
    def unpredicted(self) -> int:
        """Bytes reached although no view claims them."""
        return _count_beyond(self.observed, self.predicted)

    @property
    def unreached(self) -> int:
        """Bytes claimed and not reached."""
        return _count_beyond(self.predicted, self.observed)

    @property
    def equal(self) -> bool:
        """Whether both are the same set."""
        return not self.unpredicted and not self.unreached

    def __str__(self) -> str:
        predicted, observed = (sum(int(m.sum()) for m in maps.values()) for maps in (self.predicted, self.observed))
        return (
            f"{predicted} bytes predicted, {observed} observed: {self.unpredicted} reached that no view claims, "
            f"{self.unreached} claimed that were not reached"
        )


def _count_beyond(these: dict[str, np.ndarray], those: dict[str, np.ndarray]) -> int:
    """Bytes of ``these`` that are not among ``those``."""
    return sum(int((mask & ~those[name] if name in those else mask).sum()) for name, mask in these.items())


def predict(views: Iterable[View], slots: Sequence[int]) -> dict[str, np.ndarray]:
    """The bytes that ``views`` (axes block, token, ...) give to ``slots``: a bool array for each storage's name.

    Raises:
        ValueError: a view without a block and a token axis in front, or a slot beyond its blocks.
    """
    masks: dict[str, np.ndarray] = {}
    slots = np.asarray([s for s in slots if s >= 0], np.int64)
    for view in views:
        if view.axes[:2] != ("block", "token"):
            raise ValueError(f"{view.name} has the axes {view.axes}: slots are (block, token) pairs, in front")
        if len(slots) and slots.max() >= (limit := view.shape[0] * view.shape[1]):
            raise ValueError(f"slot {slots.max()} is beyond {view.name}, whose blocks hold slots 0 to {limit - 1}")
        mask = masks.setdefault(view.storage.name, np.zeros(view.storage.nbytes, bool))
        mask[view.bytes_of(view.starts[slots // view.shape[1], slots % view.shape[1]]).ravel()] = True
    return masks


def observe(run: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Call ``run(fill)`` for 0x00 and 0xFF and compare what it leaves.

    Args:
        run: allocates buffers with every byte ``fill``, does its work, and returns the storages (uint8) by name.
    """
    reached: dict[str, np.ndarray] = {}
    for fill in FILLS:
        for name, storage in run(fill).items():
            changed = (storage != fill).cpu().numpy()
            reached[name] = reached[name] | changed if name in reached else changed
    return reached
