"""Real prefill and decode engines behind one thin proxy, once for each connector, in alternation."""
