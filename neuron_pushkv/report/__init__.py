"""Plots, and one self-contained HTML page of text, tables and plots. Knows nothing of what is shown.

Needs matplotlib and Jinja2 (``pip install 'neuron-pushkv[bench]'``).
"""
