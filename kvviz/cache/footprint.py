"""Compare the bytes that a launch should write with the bytes that the launch really writes.

*Predicted* bytes are computed from the views and from the slots. *Observed* bytes come from an experiment. The same
work is done twice, first in buffers filled with 0x00, then in buffers filled with 0xFF. If the value of a byte has
changed at least once, the byte was written. This finds every write, because a written value cannot be equal to both
fillings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvviz.audit.view import View

FILLS = (0x00, 0xFF)
"""The values with which the buffers are filled in the two executions."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Predicted and observed bytes of all storages.

    Attributes:
        predicted, observed: for each name of a storage, a bool array with one entry per byte. An entry is True if the
            byte is predicted or observed. If a storage has no array, no byte of it is predicted or observed.
    """

    predicted: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]

    @property
    def unpredicted(self) -> int:
        """Return how many bytes were observed, but not predicted."""
        return _count_only_in(self.observed, self.predicted)

    @property
    def unreached(self) -> int:
        """Return how many bytes were predicted, but not observed."""
        return _count_only_in(self.predicted, self.observed)

    @property
    def equal(self) -> bool:
        """Return True if the observed bytes are exactly the predicted bytes."""
        return not self.unpredicted and not self.unreached

    def __str__(self) -> str:
        predicted, observed = (sum(int(m.sum()) for m in masks.values()) for masks in (self.predicted, self.observed))
        return (
            f"{predicted} bytes predicted, {observed} observed: {self.unpredicted} observed but not predicted, "
            f"{self.unreached} predicted but not observed"
        )


def _count_only_in(masks: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> int:
    """Count the bytes that are True in ``masks``, but not in ``others``."""
    return sum(int((mask & ~others[name] if name in others else mask).sum()) for name, mask in masks.items())


def predict(views: Iterable[View], slots: Sequence[int]) -> dict[str, np.ndarray]:
    """Find the bytes of ``views`` that belong to ``slots``. Return a bool array per storage, by name.

    Args:
        views: views whose first two axes are block and token.
        slots: the slots of the written tokens. A negative slot is padding, and no byte belongs to it.

    Raises:
        ValueError: the first two axes of a view are not block and token. Or a slot is not an integer. Or a view does
            not have a slot.
    """
    numbers = np.asarray(slots)
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(
            f"slots must be integers, but the first slots are {numbers.ravel()[:4].tolist()}: pass integers"
        )
    written = numbers[numbers >= 0].astype(np.int64)
    masks: dict[str, np.ndarray] = {}
    for view in views:
        if view.axes[:2] != ("block", "token"):
            raise ValueError(
                f"{view.name} has the axes {view.axes}, but the first two axes must be block and token: pass a view "
                "with the axes of kvviz.cache.geometry.owners"
            )
        if len(written) and written.max() >= (limit := view.shape[0] * view.shape[1]):
            raise ValueError(f"slot {written.max()} does not exist: {view.name} has the slots 0 to {limit - 1}")
        mask = masks.setdefault(view.storage.name, np.zeros(view.storage.nbytes, bool))
        mask[view.bytes_of(view.starts[written // view.shape[1], written % view.shape[1]]).ravel()] = True
    return masks


def observe(run: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Call ``run(0x00)`` and ``run(0xFF)``, and return the bytes that were written.

    Args:
        run: a function with the argument ``fill``. It allocates buffers in which every byte has the value ``fill``.
            Then it does the work. It returns a dict with the uint8 tensor of each storage, by name.

    Returns:
        For each name of a storage, a bool array with one entry per byte.

    Raises:
        ValueError: a storage is a ``meta`` tensor.
    """
    reached: dict[str, np.ndarray] = {}
    for fill in FILLS:
        for name, storage in run(fill).items():
            if storage.is_meta:
                raise ValueError(f"storage {name!r} is a meta tensor, which has no bytes: allocate the storage on cpu")
            changed = (storage != fill).cpu().numpy()
            reached[name] = reached[name] | changed if name in reached else changed
    return reached
