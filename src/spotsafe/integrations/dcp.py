"""torch.distributed.checkpoint over spotsafe's format: manifests, digests, and nothing that runs code when loaded.

::

    import torch.distributed.checkpoint as dcp
    from spotsafe.integrations.dcp import SpotsafeReader, SpotsafeWriter

    writer = SpotsafeWriter("s3://bucket/run-0412")
    dcp.save({"model": model, "epoch": 3}, checkpoint_id="step-4000", storage_writer=writer)
    dcp.load(state, storage_reader=SpotsafeReader("s3://bucket/run-0412@4000"))

What `dcp.save` wrote is a checkpoint like any other: `spotsafe ls`, `verify` and `spotsafe.load` know it, and a
session starts with its weights by ``init_from=``. `dcp.load` reads checkpoints of sessions too, by the names that
`spotsafe.exchange.dcp_names` describes.
"""

from __future__ import annotations

from spotsafe.integrations.dcp_reader import SpotsafeReader
from spotsafe.integrations.dcp_writer import SpotsafeWriter

__all__ = ["SpotsafeReader", "SpotsafeWriter"]
