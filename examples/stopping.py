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


def stoppable(main):
    """Call ``main``; the runtime has stopped at a step boundary when Ctrl-C comes out of it."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; with --checkpoint-dir the same command goes on with --resume", flush=True)
        sys.exit(130)
