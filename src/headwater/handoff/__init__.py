"""Hand-off of a prompt's KV blocks from the worker that computes it to the one that decodes.

    decode worker                                   prefill worker
      admits the request, reserves its blocks
      Submit(request, export) ------------------->    prefills in chunks
                        <------------- BlocksReady      after each chunk: these can be read
      reads them into its own, while the next chunk is computed
                        <--------------- StepFrame      the first token
      decodes on
      ReleaseBlocks ----------------------------->    their blocks are free

Only the decode worker writes into its memory, and no peer is given the right to: a peer that hangs and wakes up, or is
no longer who it was, can damage nothing. What it reads is kept for it by the prefill worker for a time that both count
from before the request was sent, so the reader's count ends first.

Whatever fails, the decode worker keeps what has arrived and computes the rest itself.

Engines that move KV by themselves have ways of their own: `tickets` that a prefill ends with and the decode takes
along, or requests that both engines of a pair get at once (`paired`).
"""
