"""The model on kernels: its stages under a plan, with weights and caches in native bytes on one device."""
