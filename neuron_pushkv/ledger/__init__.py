"""What each transfer has been promised and has got. Pure: no I/O, the clock is passed in.

:mod:`inbound` is a receiver's side, :mod:`outbound` a sender's. Both take what happened and the time, change their
state, and return :mod:`effects` for the engine to carry out.
"""
