"""From any layout into any other: who sends which heads, which writes that takes, and what is packed before.

``pair`` is the way in: a :class:`~neuron_pushkv.plan.pair.PairPlan` for two caches. ``mapping`` says what can be mapped
at all, ``shares`` which ranks ask which, ``pieces`` what is contiguous on both sides. ``packing`` makes large writes of
small pieces, from ``cells`` that it copies into ``staging`` memory.
"""
