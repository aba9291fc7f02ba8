"""HTTP front of a fleet: one OpenAI request in, a prefill leg and a decode leg out, one answer back."""

from __future__ import annotations

from neuron_pushkv.router.app import create_app, serve

__all__ = ["create_app", "serve"]
