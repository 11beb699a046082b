-- Say at one moment what a queue holds.
--
-- KEYS  1..3  request streams
--       4     dead-letter stream
--       5     config hash
-- ARGV  1     consumer group
-- Returns entries, of these pending, dead letters, age of the oldest entry in ms (-1: there is none), and from the
-- config max_length and paused (nil where they are not set).

local entries, pending, oldest = 0, 0, nil
for i = 1, 3 do
  entries = entries + redis.call('XLEN', KEYS[i])
  local first = redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)[1]
  if first then
    local ms = tonumber(string.match(first[1], '^%d+'))
    oldest = oldest and math.min(oldest, ms) or ms
  end
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[i])
  for _, pairs in ipairs(groups) do -- none where there is no stream yet
    local group = {}
    for j = 1, #pairs, 2 do group[pairs[j]] = pairs[j + 1] end
    if group.name == ARGV[1] then pending = pending + group.pending end
  end
end
local now = redis.call('TIME')
local age = oldest and math.max(now[1] * 1000 + math.floor(now[2] / 1000) - oldest, 0) or -1
local config = redis.call('HMGET', KEYS[5], 'max_length', 'paused')
return { entries, pending, redis.call('XLEN', KEYS[4]), age, config[1], config[2] }
