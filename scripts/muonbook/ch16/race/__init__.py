"""Every optimizer's step compared with its bare matrix products: what make bench NAMES=step measures."""
