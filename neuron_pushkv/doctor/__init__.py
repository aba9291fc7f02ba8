"""What a node can do, found out before traffic: ``pushkv doctor``.

``findings`` is what a check says. Checks are functions: of settings (``configuration``), files and limits (``host``),
variables (``environment``), the device (``accelerators``), libfabric (``network``), another engine (``peer``,
``agreement``) and a transfer with another doctor (``trial``, ``serving``, ``side``). ``examination`` makes all of them;
an engine's start-up (``starting``) and the router's ``/ready`` make theirs with the same functions.
"""
