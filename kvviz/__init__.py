"""kvviz: which bytes of a KV cache belong to whom, and who is writing on whom.

Three floors, each importing only those beneath it: ``kvviz.memory`` (what bytes are where),
``kvviz.engine`` (what writes, reads and moves them) and ``kvviz.show`` (what people see; it knows
``memory`` alone).
"""

__version__ = "0.1.0"
