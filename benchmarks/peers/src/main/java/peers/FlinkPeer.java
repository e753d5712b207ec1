package peers;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.cep.CEP;
import org.apache.flink.cep.functions.PatternProcessFunction;
import org.apache.flink.cep.nfa.aftermatch.AfterMatchSkipStrategy;
import org.apache.flink.cep.pattern.Pattern;
import org.apache.flink.cep.pattern.conditions.IterativeCondition;
import org.apache.flink.cep.pattern.conditions.SimpleCondition;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

/** Flink CEP over events in memory, with parallelism 2 and a sink that only collects: FlinkPeer EVENTS PATTERN OUT. Prints the rate of the second of two runs. */
public class FlinkPeer {
    static Event[] events;
    static final List<long[]> FOUND = Collections.synchronizedList(new ArrayList<>());

    public static void main(String[] arguments) throws Exception {
        events = Event.read(arguments[0]);
        double rate = 0;
        for (int run = 0; run < 2; run++) {
            FOUND.clear();
            long started = System.nanoTime();
            run(arguments[1]);
            rate = events.length / ((System.nanoTime() - started) / 1e9);
        }
        Event.write(arguments[2], FOUND);
        System.out.println("rate: " + rate);
        System.exit(0);
    }

    static void run(String which) throws Exception {
        StreamExecutionEnvironment env = StreamExecutionEnvironment.getExecutionEnvironment();
        env.setParallelism(2);
        env.getConfig().enableObjectReuse();
        GeneratorFunction<Long, Event> generator = at -> events[at.intValue()];
        DataGeneratorSource<Event> source = new DataGeneratorSource<>(generator, events.length, TypeInformation.of(Event.class));
        WatermarkStrategy<Event> times = WatermarkStrategy.<Event>forBoundedOutOfOrderness(Duration.ofSeconds(2)).withTimestampAssigner((event, before) -> event.ts);
        DataStream<Event> stream = env.fromSource(source, times, "events").setParallelism(1);
        CEP.pattern(stream.keyBy(event -> event.card), which.equals("fraud") ? fraud() : steps())
            .inEventTime().process(new Collecting()).returns(Long.class).sinkTo(new DiscardingSink<>());
        env.execute();
    }

    static Pattern<Event, ?> fraud() {
        return Pattern.<Event>begin("small", AfterMatchSkipStrategy.skipPastLastEvent()).where(SimpleCondition.of(event -> event.amount < 10)).timesOrMore(3).consecutive().greedy()
            .next("big").where(new Large()).within(Duration.ofMinutes(10));
    }

    static Pattern<Event, ?> steps() {
        return Pattern.<Event>begin("a").where(SimpleCondition.of(event -> event.kind == 0)).followedBy("b").where(SimpleCondition.of(event -> event.kind == 1))
            .followedBy("c").where(SimpleCondition.of(event -> event.kind == 2)).within(Duration.ofMinutes(1));
    }

    /** Above 1000, and above 50 times the average of the small ones. */
    public static class Large extends IterativeCondition<Event> {
        @Override
        public boolean filter(Event event, Context<Event> context) throws Exception {
            if (event.amount <= 1000) {
                return false;
            }
            double sum = 0;
            int count = 0;
            for (Event small : context.getEventsForPattern("small")) {
                sum += small.amount;
                count++;
            }
            return event.amount > 50 * (sum / count);
        }
    }

    /** Keeps what it is told. */
    public static class Collecting extends PatternProcessFunction<Event, Long> {
        @Override
        public void processMatch(Map<String, List<Event>> match, Context context, Collector<Long> out) {
            long first = Long.MAX_VALUE;
            long last = Long.MIN_VALUE;
            long rows = 0;
            long card = 0;
            for (List<Event> part : match.values()) {
                for (Event event : part) {
                    first = Math.min(first, event.ts);
                    last = Math.max(last, event.ts);
                    card = event.card;
                    rows++;
                }
            }
            FOUND.add(new long[] {card, first, last, rows});
            out.collect(card);
        }
    }
}
