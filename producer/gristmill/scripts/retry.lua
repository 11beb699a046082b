-- Put dead letters back into their queue as fresh requests; bounded at admission like submit.lua.
--
-- KEYS  1     dead-letter stream
--       2..4  request streams: high, default, low
--       5     config hash (field max_length overrides the bound)
--       6...  per letter the result key of its request
-- ARGV  1     admission bound: entries that the streams may hold (used if the config names none)
--       2     seconds to keep the "pending" mark
--       3...  per letter its entry ID in the dead-letter stream
-- Returns one integer per letter: 1 queued; 0 no such letter (retried already, or purged); -1 refused: queue full;
-- -2 refused: its ID waits again or has another answer by now.
-- What is queued has neither the old deadline, which has passed, nor a ttl of 0, whose reader is gone.

local STREAMS = { high = 2, default = 3, low = 4 }
local OURS = { reason = true, deliveries = true, worker = true } -- what finish.lua put before the request's fields

local limit = tonumber(ARGV[1])
local configured = redis.call('HGET', KEYS[5], 'max_length')
if configured and string.find(configured, '^%d+$') then limit = tonumber(configured) end
local room = limit
for i = 2, 4 do room = room - redis.call('XLEN', KEYS[i]) end

local function is_open(known) -- may the ID be queued again?
  if type(known) ~= 'string' or known == 'done' then return true end
  local read, result = pcall(cjson.decode, known)
  return read and type(result) == 'table' and type(result.error) == 'table'
    and result.error.code == 'dead_lettered'
end

local function request(letter) -- its stream and its fields
  local stream, fields, at = STREAMS.default, {}, 1
  while at <= 5 and OURS[letter[at]] do at = at + 2 end
  if letter[at] == 'priority' and STREAMS[letter[at + 1]] then
    stream = STREAMS[letter[at + 1]]
    at = at + 2
  end
  for i = at, #letter - 1, 2 do
    local name, value = letter[i], letter[i + 1]
    if name ~= 'deadline' and not (name == 'ttl' and value == '0') then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  return stream, fields
end

local outcome = {}
for i = 6, #KEYS do
  local entry = ARGV[i - 3]
  local letter = redis.call('XRANGE', KEYS[1], entry, entry)[1]
  local code = 1
  if not letter then
    code = 0
  elseif not is_open(redis.pcall('GET', KEYS[i])) then
    code = -2
  elseif room <= 0 then
    code = -1
  else
    local stream, fields = request(letter[2])
    redis.call('SET', KEYS[i], 'pending', 'EX', ARGV[2])
    redis.call('XADD', KEYS[stream], '*', unpack(fields))
    redis.call('XDEL', KEYS[1], entry)
    room = room - 1
  end
  outcome[i - 5] = code
end
return outcome
