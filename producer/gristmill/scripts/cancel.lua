-- Cancel requests that have no result yet; a worker's late answer is then dropped by finish.lua.
--
-- KEYS  1     sorted set of cancelled IDs
--       2...  per request its result key and the reply stream to push to (the sorted set's key: none is known)
-- ARGV  1  seconds to keep the result              3  IDs that the sorted set may hold
--       2  ms after which an ID leaves the set     4  entries that a reply stream may hold
--       5...  per request its ID and its result's JSON
-- Returns per request what its status is now: "cancelled"; "ok", "error", "expired" or "done" (pushed only): too late;
-- "unknown": it was never submitted with submit.lua, or its result was not kept.

local function status(known)
  if known == 'done' then return 'done' end
  local read, result = pcall(cjson.decode, known)
  return read and type(result) == 'table' and type(result.status) == 'string' and result.status or 'unknown'
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local outcome, added = {}, false
for i = 2, #KEYS, 2 do
  local known, id, result = redis.pcall('GET', KEYS[i]), ARGV[i + 3], ARGV[i + 4]
  if known == 'pending' then
    redis.call('SET', KEYS[i], result, 'EX', ARGV[1])
    redis.call('ZADD', KEYS[1], now, id)
    if KEYS[i + 1] ~= KEYS[1] then
      local list = '[' .. result .. ']'
      redis.pcall('XADD', KEYS[i + 1], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[4], '*', 'results', list)
    end
    added = true
    outcome[i / 2] = 'cancelled'
  else
    outcome[i / 2] = type(known) == 'string' and status(known) or 'unknown'
  end
end
if added then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return outcome
