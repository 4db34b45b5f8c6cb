"""Compare the bytes that a launch should reach with the bytes that it really reaches.

*Predicted* bytes follow from the views and from the slots that are written. *Observed* bytes come from an experiment:
do the same work twice, in buffers filled with 0x00 and in buffers filled with 0xFF. A byte was reached unless it keeps
its fill both times. So every write is seen, even a write of 0x00 or 0xFF.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvviz.audit.view import View

FILLS = (0x00, 0xFF)
"""Two different values: a byte that is written cannot be equal to both."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Predicted and observed bytes of all storages.

    Attributes:
        predicted, observed: by storage name, a bool array with one entry per byte. A storage that has no array on
            one side counts as all False there.
    """

    predicted: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]

    @property
    def unpredicted(self) -> int:
        """Bytes that were observed and not predicted."""
        return _count_only_in(self.observed, self.predicted)

    @property
    def unreached(self) -> int:
        """Bytes that were predicted and not observed."""
        return _count_only_in(self.predicted, self.observed)

    @property
    def equal(self) -> bool:
        """True if exactly the predicted bytes were reached."""
        return not self.unpredicted and not self.unreached

    def __str__(self) -> str:
        predicted, observed = (sum(int(m.sum()) for m in masks.values()) for masks in (self.predicted, self.observed))
        return (
            f"{predicted} bytes predicted, {observed} observed: {self.unpredicted} observed but not predicted, "
            f"{self.unreached} predicted but not observed"
        )


def _count_only_in(masks: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> int:
    """Count the bytes that are in ``masks`` and not in ``others``."""
    return sum(int((mask & ~others[name] if name in others else mask).sum()) for name, mask in masks.items())


def predict(views: Iterable[View], slots: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the bytes of ``views`` that belong to ``slots``: one bool array per storage, by name.

    Args:
        views: views whose first two axes are block and token.
        slots: token slots. Negative slots are padding and reach no byte.

    Raises:
        ValueError: a view has other axes, a slot is not an integer, or a slot is beyond the blocks of a view.
    """
    numbers = np.asarray(slots)
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"slots must be integers, but they are {numbers.dtype}: {numbers.ravel()[:4].tolist()}")
    written = numbers[numbers >= 0].astype(np.int64)
    masks: dict[str, np.ndarray] = {}
    for view in views:
        if view.axes[:2] != ("block", "token"):
            raise ValueError(
                f"{view.name} has the axes {view.axes}: the first two must be block and token, because a slot is a "
                f"block and a token"
            )
        if len(written) and written.max() >= (limit := view.shape[0] * view.shape[1]):
            raise ValueError(f"slot {written.max()} is beyond {view.name}, whose blocks hold slots 0 to {limit - 1}")
        mask = masks.setdefault(view.storage.name, np.zeros(view.storage.nbytes, bool))
        mask[view.bytes_of(view.starts[written // view.shape[1], written % view.shape[1]]).ravel()] = True
    return masks


def observe(run: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Call ``run(0x00)`` and ``run(0xFF)``, and return the bytes that were reached.

    Args:
        run: a function of one argument. It allocates buffers in which every byte has that value, does its work, and
            returns the storages (uint8) by name.

    Returns:
        One bool array per storage, by name.

    Raises:
        ValueError: a storage is a ``meta`` tensor.
    """
    reached: dict[str, np.ndarray] = {}
    for fill in FILLS:
        for name, storage in run(fill).items():
            if storage.is_meta:
                raise ValueError(f"storage {name!r} is a meta tensor, which has no bytes to observe: allocate on cpu")
            changed = (storage != fill).cpu().numpy()
            reached[name] = reached[name] | changed if name in reached else changed
    return reached
