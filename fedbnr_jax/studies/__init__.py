"""Studies: experiments on top of the library, the paper's and our own.

A study takes plain arguments, writes its tables and figures into a folder, and returns
what the command of the same name in `launch` prints.
"""
