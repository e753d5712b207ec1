-- A pipeline in SQL: sensors report temperatures, and views follow them.
--
--     headrace plan 20_sql.sql
--     headrace run 20_sql.sql --log file:data

CREATE TOPIC readings (
    sensor STRING, celsius DOUBLE, read_at TIMESTAMP,
    WATERMARK FOR read_at AS read_at - INTERVAL '10' SECOND
) WITH (key = 'sensor', retention = '30 days');

CREATE TABLE sensors (sensor STRING PRIMARY KEY, room STRING, max_celsius DOUBLE);

-- The newest reading of each sensor.
CREATE VIEW newest AS
SELECT sensor, celsius, read_at FROM readings
QUALIFY ROW_NUMBER() OVER (PARTITION BY sensor ORDER BY read_at DESC) = 1;

-- How warm each room is, now.
CREATE VIEW rooms AS
SELECT s.room, count(*) AS sensors, avg(n.celsius) AS celsius
FROM newest AS n JOIN sensors AS s ON n.sensor = s.sensor
GROUP BY s.room;

-- Minutes of each sensor, corrected when readings come late.
CREATE VIEW minutes AS
SELECT sensor, window_start, window_end, count(*) AS readings, max(celsius) AS highest
FROM TUMBLE(readings, read_at, INTERVAL '1' MINUTE)
GROUP BY sensor, window_start, window_end
EMIT CHANGES LATE CORRECT INTERVAL '1' HOUR;

-- Readings that are too high, each with its room.
CREATE STREAM too_warm AS
SELECT r.sensor, r.celsius, r.read_at, s.room
FROM readings AS r JOIN sensors AS s ON r.sensor = s.sensor
WHERE r.celsius > s.max_celsius;

CREATE ALERT heat WITH (every = '5 minutes', by = 'room') AS SELECT * FROM too_warm;

-- Rows to begin with. Each INSERT is stored once, however often the pipeline runs.
INSERT INTO sensors VALUES ('a', 'cellar', 18.0), ('b', 'attic', 30.0), ('c', 'attic', 30.0);
INSERT INTO readings VALUES
    ('a', 12.0, TIMESTAMP '2026-01-31 12:00:05'),
    ('b', 24.0, TIMESTAMP '2026-01-31 12:00:10'),
    ('c', 32.0, TIMESTAMP '2026-01-31 12:00:15'),
    ('a', 13.0, TIMESTAMP '2026-01-31 12:00:40');
