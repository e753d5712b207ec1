package peers;

import com.espertech.esper.common.client.EPCompiled;
import com.espertech.esper.common.client.EventBean;
import com.espertech.esper.common.client.configuration.Configuration;
import com.espertech.esper.compiler.client.CompilerArguments;
import com.espertech.esper.compiler.client.EPCompilerProvider;
import com.espertech.esper.runtime.client.EPRuntime;
import com.espertech.esper.runtime.client.EPRuntimeProvider;
import com.espertech.esper.runtime.client.EPStatement;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;

/** Esper over the same events, in one thread, in order of time: EsperPeer EVENTS PATTERN OUT. Prints the rate of the second of two runs. */
public class EsperPeer {
    static final String FRAUD = "select * from Event match_recognize (partition by card measures first(small.ts) as f, big.ts as l, small.countOf() + 1 as n, big.card as card "
        + "pattern (small{3,} big) define small as small.amount < 10, "
        + "big as big.amount > 1000 and big.amount > 50 * small.average(s => s.amount) and big.ts - small[0].ts <= 600000)";
    static final String STEPS = "select a.ts as f, c.ts as l, 3 as n, a.card as card from pattern [every a=Event(kind=0) -> "
        + "((b=Event(kind=1, card=a.card) -> c=Event(kind=2, card=a.card)) where timer:within(60001 milliseconds))]";

    public static void main(String[] arguments) throws Exception {
        Event[] events = Event.read(arguments[0]);
        Arrays.sort(events, Comparator.comparingLong(event -> event.ts));
        List<long[]> found = new ArrayList<>();
        double rate = 0;
        for (int run = 0; run < 2; run++) {
            found.clear();
            EPRuntime runtime = deployed(arguments[1].equals("fraud") ? FRAUD : STEPS, "run" + run, found);
            long started = System.nanoTime();
            send(runtime, events, arguments[1].equals("steps"));
            rate = events.length / ((System.nanoTime() - started) / 1e9);
            runtime.destroy();
        }
        Event.write(arguments[2], found);
        System.out.println("rate: " + rate);
        System.exit(0);
    }

    static EPRuntime deployed(String query, String name, List<long[]> found) throws Exception {
        Configuration configuration = new Configuration();
        configuration.getCommon().addEventType(Event.class);
        configuration.getRuntime().getThreading().setInternalTimerEnabled(false);
        EPCompiled compiled = EPCompilerProvider.getCompiler().compile("@name('q') " + query, new CompilerArguments(configuration));
        EPRuntime runtime = EPRuntimeProvider.getRuntime(name, configuration);
        runtime.getEventService().advanceTime(0);
        EPStatement statement = runtime.getDeploymentService().deploy(compiled).getStatements()[0];
        statement.addListener((fresh, old, from, which) -> {
            for (EventBean match : fresh) {
                found.add(new long[] {number(match, "card"), number(match, "f"), number(match, "l"), number(match, "n")});
            }
        });
        return runtime;
    }

    static long number(EventBean match, String name) {
        return ((Number) match.get(name)).longValue();
    }

    static void send(EPRuntime runtime, Event[] events, boolean timed) {
        long now = 0;
        for (Event event : events) {
            if (timed && event.ts > now) {
                now = event.ts;
                runtime.getEventService().advanceTime(now);
            }
            runtime.getEventService().sendEventBean(event, "Event");
        }
    }
}
