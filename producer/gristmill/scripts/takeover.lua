-- Make entries of workers that were silent for a lease one's own. This is no delivery: counts stay as they are.
--
-- KEYS  1  request stream
-- ARGV  1  consumer group      4  cursor: "0-0", or what the last call returned
--       2  worker name         5  entries to take at the most
--       3  the lease in ms
-- Returns the cursor ("0-0" at the end) and the IDs taken.

local reply = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
return { reply[1], reply[2] }
