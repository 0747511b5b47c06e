"""Stopping an example with Ctrl-C and going on from there, as if nothing had happened."""

from __future__ import annotations

import sys


def parse(parser):
    """Parse the arguments, with those for checkpoints among them."""
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="written every epoch and at Ctrl-C")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint-dir")
    args = parser.parse_args()
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    return args


def going_on(builder, args):
    """The builder with checkpoints as the arguments say."""
    if args.checkpoint_dir:
        builder.checkpoint_dir(args.checkpoint_dir)
    if args.resume:
        builder.resume(args.checkpoint_dir, missing_ok=True)
    return builder


def tell(m):
    """Print an epoch's line."""
    print(f"epoch {m.epoch:2}  loss {m.avg_loss:.4f}", end="  ")
    print(f"accuracy {m.scalars['accuracy']:6.1%}  {m.num_samples / m.epoch_s:6,.0f} samples/s")
    sys.stdout.flush()


def follow(handle, quiet=False):
    """Tell of every closed epoch, of those too that closed while Ctrl-C stopped the run."""
    try:
        with handle:
            for m in handle.metrics():
                quiet or tell(m)
    finally:
        for m in handle.poll_metrics():
            quiet or tell(m)


def stoppable(main):
    """Call ``main``; the runtime has stopped at a step boundary when Ctrl-C comes out of it."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; with --checkpoint-dir the same command goes on with --resume", flush=True)
        sys.exit(130)
