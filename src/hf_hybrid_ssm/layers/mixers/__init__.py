"""Every long-range mixer, behind one interface."""
