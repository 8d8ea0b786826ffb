"""Planning: chooses every page's home and every pool's size, and predicts the seconds of a step."""
