"""Published silent defects of other projects, shown in their own released versions.

    python -m bench.museum_peers [-k words] [--json FILE] [--list]

A case names one public thread and the release that had the defect. The case installs that release
from the package index into a folder of its own, calls it as its users do, and compares what it
answers with what is right. Where a later release has the mend, that release must answer right.
"""
