"""The policy's attention kernels: one interface, several implementations."""
