"""The two-level lab: a VFIO host in software, and Banyan running in it. README.md tells the picture.

scenario.py   what a scenario file says
kernel.py     the stock kernel of both levels, fetched and unpacked
modules.py    which kernel modules are needed, and in which order
archive.py    writes a cpio archive, which is what an initramfs is
image.py      what goes into the initramfs of the host and of the guests
machine.py    runs QEMU and records what the host says
judge.py      compares what was said with what the scenario expects
"""
