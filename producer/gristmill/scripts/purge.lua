-- Delete dead letters of an age.
--
-- KEYS  1  dead-letter stream
-- ARGV  1  age in ms, by Redis's clock, from which on they go (0: all)
-- Returns how many were deleted.

local now = redis.call('TIME')
local youngest = now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[1]
return redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f', math.max(youngest + 1, 0)))
