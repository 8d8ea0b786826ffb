"""Version: that of this package, which manifests and the command line name."""

VERSION = "0.1.0"
