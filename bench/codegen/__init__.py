"""What the CUDA drivers compile to, found out without a GPU.

launches.py    which drivers a call launches and with arguments of which types, from Numba's simulator
build.py       their PTX and machine code for several compute capabilities
sass.py        the disassembled machine code: loops, and what they are made of
cards.py       what a multiprocessor and a card can do: occupancy and peak rates
checks.py      what must hold of every kernel
tally.py       what one block of a kernel on tiles executes
roofline.py    the time that the instructions of a kernel allow at best
"""
