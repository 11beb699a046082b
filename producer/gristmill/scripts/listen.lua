-- Create a client's reply stream, or keep it alive and drop what the client has read.
--
-- KEYS  1  reply stream
-- ARGV  1  seconds that the stream lives without another call
--       2  ID of the last entry read ("0" = none)
-- Returns 1 if this is not the stream that the client has read so far, so that results may have been missed: it
-- was created now, or the entry read last is not in it (another server that does not know it); else 0. What is
-- dropped for the stream's length alone is the oldest: then all that is there was not read.

local new = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XADD', KEYS[1], '*', 'open', '1')
  new = 1
elseif ARGV[2] ~= '0' then
  if #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) == 1 then
    redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2])
  else
    new = 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return new
