"""Everybody that a worker talks to.

``contacts`` is the way in. ``home`` is the line to the engine's own directory, ``routes`` finds other engines' ranks,
``links`` knows the peers that are connected.
"""
