"""The cast sweep (B4): casts that a decode path pays memory traffic for, and what becomes of each.

The plan's rule is "emit the dtype that the next consumer needs". It is about tensors in memory, so a cast is a hit

- ``widened_after_narrow``: a producer wrote a narrower float to memory, and a pass of its own (``x.float()``,
  ``.to(torch.float32)``) does nothing but read it and write it wider; or
- ``narrowed_only_next``: a wide result was written to memory, and all that happens to it is to be narrowed (a cast, or
  a call of a quantiser);
- ``unclear``: a cast to FP32 or FP64 of a value whose dtype the tree does not tell. It stays open until somebody looks.

A hit is *open*, *exempt* (``# cast: exempt(reason)`` on its line) or *fixed* (``# cast: fixed(B4_router)``: a rung of
the ladder's spine, from which on a traced step casts nothing there).

Other casts are *free*, listed apart and no hits. Most cost no pass of their own: in a kernel's registers (a ``jit``
function, unless it loads what it stored narrower), inside a reduction, of a value that has the dtype already, of
integers, or a choice of the dtype that a producer emits (where a marker may stand: a kernel's store rounds as a cast
does). The others are narrowings of what is read wide elsewhere too, which the rule does not ask for.

What a name may hold is followed through statements, views, containers, attributes, arguments and calls, as far as the
tree shows it; what only runs can show, such as what a function that is handed over returns, is left to the trace.

References emulate rounding in PyTorch on purpose and are not swept.
"""
