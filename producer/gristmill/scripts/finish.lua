-- Finish a batch: each request leaves the stream in the same step that stores its result.
--
-- KEYS  1..3       request streams: high, default, low
--       4          dead-letter stream
--       5..4+R     reply streams of the clients in this batch
--       5+R...     one result key per item (the dead-letter stream's key where a request has no usable ID)
-- ARGV  1  consumer group          4  seconds to keep the "done" mark of a reply-only request
--       2  worker name             5  R, the number of reply streams
--       3  entries that a reply stream may hold
--       6     JSON list of the results that go to no reply stream, '[]' = none
--       7..6+R      for each reply stream the JSON list of its results
--       7+R... per item, seven values:
--             number of its request stream, 1 to 3 | entry ID | number of its reply stream, 0 = none | ttl of the result in seconds, 0 = reply only
--             bytes of its result, 0 = none | reason for the dead letters, '' = none | deliveries so far
-- The lists have their results in the order of the items, with a comma and nothing else between them. They come
-- whole because Lua reads every byte of a string that it makes, and as a rule none has to be made.
-- Returns one integer per item: 1 finished here; 0 dropped, because the entry was acknowledged before
-- (another worker took it over and answered) or the ID had its answer already.

local group, worker, cap, mark_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local streams = tonumber(ARGV[5])
local MOST_FIELDS = 64 -- of a foreign entry, kept with its dead letter
local MOST_LETTERS = 10000 -- the oldest go first

local PRIORITIES = { 'high', nil, 'low' }

local function bury(stream, entry, reason, deliveries)
  local found = redis.call('XRANGE', KEYS[stream], entry, entry)[1]
  if not found then return end
  local letter = { 'reason', reason, 'deliveries', deliveries, 'worker', worker }
  if PRIORITIES[stream] then
    letter[7] = 'priority'
    letter[8] = PRIORITIES[stream]
  end
  for i = 1, math.min(#found[2], 2 * MOST_FIELDS) do letter[#letter + 1] = found[2][i] end
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', MOST_LETTERS, '*', unpack(letter))
end

local lists, at = {}, 6 -- per reply stream: its JSON list, and what of it was finished here
for stream = 0, streams do
  lists[stream] = { text = ARGV[at], from = 2, done = {}, missing = false }
  at = at + 1
end

local outcome = {}
for i = 5 + streams, #KEYS do
  local stream, entry, list = tonumber(ARGV[at]), ARGV[at + 1], lists[tonumber(ARGV[at + 2])]
  local ttl, bytes, reason, deliveries = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), ARGV[at + 5], ARGV[at + 6]
  local from, to = list.from, list.from + bytes - 1
  local done = redis.call('XACK', KEYS[stream], group, entry)
  if done == 1 then
    if reason ~= '' then bury(stream, entry, reason, deliveries) end
    redis.call('XDEL', KEYS[stream], entry)
    if bytes > 0 then
      -- A foreign value of another type must not stop the batch half way: it is overwritten.
      local known = redis.pcall('GET', KEYS[i])
      if type(known) == 'string' and known ~= 'pending' then
        done = 0
      elseif ttl > 0 then
        redis.call('SET', KEYS[i], string.sub(list.text, from, to), 'EX', ttl)
      else
        redis.call('SET', KEYS[i], 'done', 'EX', mark_ttl)
      end
    end
  end
  if bytes > 0 then
    list.from = to + 2
    if done == 1 then
      list.done[#list.done + 1] = { from, to }
    else
      list.missing = true
    end
  end
  outcome[#outcome + 1] = done
  at = at + 7
end
for stream = 1, streams do
  local list = lists[stream]
  local text = list.text
  if list.missing then
    local bodies = {}
    for i, range in ipairs(list.done) do bodies[i] = string.sub(text, range[1], range[2]) end
    text = '[' .. table.concat(bodies, ',') .. ']'
  end
  if #list.done > 0 then
    -- The reader owns its stream: it creates it and keeps it alive. Nobody reads, nothing is pushed.
    redis.pcall('XADD', KEYS[4 + stream], 'NOMKSTREAM', 'MAXLEN', '~', cap, '*', 'results', text)
  end
end
return outcome
