"""kvviz: which bytes of a KV cache belong to whom, and who is writing on whom.

``kvviz.memory`` says what bytes are where; ``kvviz.engine`` writes, reads and moves them; ``kvviz.show`` draws
them. Engine and show import memory, and not each other. ``kvviz.report`` turns notebooks into pages and knows
none of them.
"""

__version__ = "0.1.0"
