"""Planning: every page's home, every pool's size, and what a step should take."""
