-- Create a client's reply stream, or keep it alive and drop what the client has read.
--
-- KEYS  1  reply stream
-- ARGV  1  seconds that the stream lives without another call
--       2  ID of the last entry read ("0" = none)
-- Returns 1 if the stream was created now (results finished before were not pushed), else 0.

local created = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XADD', KEYS[1], '*', 'open', '1')
  created = 1
elseif ARGV[2] ~= '0' then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return created
